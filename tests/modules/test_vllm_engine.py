"""Completions by vLLM: a stand-in computes them where it is not installed."""

import dataclasses
import gc
import inspect
import stat
from contextlib import contextmanager
from types import MappingProxyType

import pytest
import torch
import vllm_stand_in
from safetensors.torch import load_file

from fedlight.devices.quantization import QuantizedBase
from fedlight.evaluation.tasks.sampling import Completions
from fedlight.modules.language.adapters import Lora
from fedlight.modules.language.base_model import Execution
from fedlight.modules.sft import SFTModule
from fedlight.stacking.client_models import work_with_models
from fedlight.support.needs import Model, Package

PROMPTS = [["the cat", "a dog ran to the park: B day after"], [], ["c"], ["it was a nice", "to"]]
SEEDS = [3, 4, 5, 3]


def make_module(model, vllm=MappingProxyType({}), **settings):
    module = SFTModule(
        model,
        **{"dtype": "fp16", "execution": Execution(vllm=None if vllm is None else dict(vllm)), **settings},
    )
    module.configure_model()
    return module


def make_states(module, count=4, seed=1):
    """Return weights under which models write quite different texts."""
    stream = torch.Generator().manual_seed(seed)
    trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    return [
        {name: torch.randn(weight.shape, generator=stream) / 4 for name, weight in trained.items()}
        for _ in range(count)
    ]


@pytest.fixture
def started(monkeypatch):
    return vllm_stand_in.install(monkeypatch)


@pytest.mark.parametrize(
    "settings",
    [{}, {"n": 2, "stop": ["a", "t "]}, {"stop": ["a"], "strip": False}],
    ids=["plain", "stops", "blanks"],
)
def test_greedy_texts_are_those_of_transformers(started, llama, settings):
    module, here = make_module(llama), make_module(llama, vllm=None)
    states, settings = make_states(module), {"temperature": 0, "max_new_tokens": 10, **settings}
    before = {name: value.clone() for name, value in module.state_dict().items()}
    stream = torch.get_rng_state()
    found = module.generate_for(states, PROMPTS, SEEDS, **settings)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert found == here.generate_for(states, PROMPTS, SEEDS, **settings)
    texts = [text for own in found for copies in own for text in copies]
    assert len(set(texts)) >= 5 / settings.get("n", 1)
    for raw in (False, True):
        assert module.generate(PROMPTS[0], raw=raw, **settings) == here.generate(
            PROMPTS[0], raw=raw, **settings
        )
    assert len(started) == 1


def test_each_prompt_has_its_clients_adapter_settings_and_seed(started, llama):
    module = make_module(llama)
    states = make_states(module)
    settings = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 7, "n": 3, "stop": ["zz"]}
    module.generate_for(states, PROMPTS, SEEDS, **settings)
    [call] = started[0].calls
    texts = [prompt for own in PROMPTS for prompt in own]
    assert [prompt["prompt_token_ids"] for prompt in call["prompts"]] == [
        module.tokenizer(text)["input_ids"] for text in texts
    ]
    owners = [0, 0, 2, 3, 3]
    prefix = "network."
    for own, owner in zip(call["adapters"], owners, strict=True):
        saved = load_file(f"{own.lora_path}/adapter_model.safetensors")
        expected = {
            name.removeprefix(prefix).replace(".default.", "."): value
            for name, value in states[owner].items()
        }
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], value) for name, value in expected.items())
    assert [own.lora_int_id for own in call["adapters"]] == [1, 1, 2, 3, 3]
    assert len({own.lora_name for own in call["adapters"]}) == 3
    for params in call["sampling"]:
        assert {**dataclasses.asdict(params), "seed": None} == {
            "n": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": None,
            "stop": ["zz"],
            "stop_token_ids": [module.tokenizer.eos_token_id],
            "max_tokens": 7,
            "skip_special_tokens": False,
        }
    seeds = [params.seed for params in call["sampling"]]
    assert seeds[:2] == seeds[3:]  # clients 0 and 3 have one seed
    assert len({*seeds}) == 3


def test_draws_of_a_client_do_not_depend_on_the_others(started, llama):
    module = make_module(llama)
    states, settings = make_states(module), {"temperature": 1.5, "n": 2, "max_new_tokens": 8}
    together = module.generate_for(states, PROMPTS, SEEDS, **settings)
    assert together[0][0][0] != together[0][0][1]
    assert module.generate_for(states[::-1], PROMPTS[::-1], SEEDS[::-1], **settings) == together[::-1]
    module.load_state_dict(states[3])
    assert module.generate(PROMPTS[3], seed=SEEDS[3], **settings) == together[3]
    assert module.generate(PROMPTS[3], seed=9, **settings) != together[3]


def test_new_weights_have_a_new_id_and_old_files_go(started, llama):
    module = make_module(llama)
    one, two, three, _ = make_states(module)
    settings = {"temperature": 0, "max_new_tokens": 4}
    module.generate_for([one, two], [["a"], ["b"]], [0, 0], **settings)
    ids = lambda: [own and own.lora_int_id for own in started[0].calls[-1]["adapters"]]  # noqa: E731
    first, second = vllm_stand_in.adapter_folders(started[0])
    assert ids() == [1, 2]
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    module.generate_for([two, three], [["a"], ["b"]], [0, 0], **settings)
    assert ids() == [2, 3]
    assert not first.exists()
    assert second.exists()
    module.generate_for([one, one], [["a"], ["b"]], [0, 0], **settings)
    assert ids() == [4, 4]  # never an id that was another's
    module.generate(["a"], raw=True, **settings)
    assert ids() == [None]
    private = first.parent
    assert list(private.iterdir()) == []
    del module
    gc.collect()
    assert not private.exists()


def test_vllm_is_started_once_with_the_modules_settings(started, llama):
    module = make_module(llama, lora=Lora(rank=12), vllm={"gpu_memory_utilization": 0.4, "max_loras": 3})
    for _ in range(2):
        module.generate(["a"], max_new_tokens=2)
    [llm] = started
    assert llm.arguments == {
        "model": llama,
        "dtype": "float16",
        "gpu_memory_utilization": 0.4,
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loras": 3,
        "generation_config": "vllm",
    }


def test_the_active_adapter_of_several_and_a_frozen_one_are_served(started, llama):
    settings = {"temperature": 0, "max_new_tokens": 6}
    module, here = (make_module(llama, num_adapters=3, vllm=engine) for engine in ({}, None))
    [state] = make_states(module, 1)
    for own in (module, here):
        own.load_state_dict(state)
        own.use_adapter("adapter2")
    expected = here.generate(PROMPTS[0], **settings)
    assert module.generate(PROMPTS[0], **settings) == expected
    module.freeze()
    assert module.generate(PROMPTS[0], **settings) == expected
    assert expected != here.generate(PROMPTS[0], raw=True, **settings)


def test_work_with_the_models_of_clients_is_one_batch(started, llama):
    module = make_module(llama)
    states = make_states(module, 3)
    settings = {"n": 1, "temperature": 0, "top_p": 1.0, "max_new_tokens": 5, "seed": 2}

    @contextmanager
    def holding(state):
        raise AssertionError("the models work side by side")
        yield

    works = [lambda model: model.generate(["the cat", "to"], **settings)] * 3
    found = work_with_models(module, states, works, holding)
    assert found == make_module(llama, vllm=None).generate_for(
        states, [["the cat", "to"]] * 3, [2] * 3, temperature=0, max_new_tokens=5
    )
    assert len(started[0].calls) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base": "nf4"}, "vllm with base='nf4'.*set base to plain"),
        ({"base": "int8"}, "vllm with base='int8'"),
        ({"dtype": "fp32"}, "vllm with a base in fp32.*set dtype to bf16"),
        ({"completions": Completions(temperature=0.005)}, "temperature=0.005 with vllm"),
        ({"merge_adapter": True, "adapter": "x"}, "merge_adapter=true.*save_merged"),
        (
            {"execution": Execution(vllm={"dtype": "half"})},
            "vllm: dtype='half' follows from the module's dtype",
        ),
        (
            {"execution": Execution(vllm={"max_lora_rank": 64})},
            "max_lora_rank=64 follows from the module's lora.rank",
        ),
    ],
)
def test_settings_without_counterpart_are_refused_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        SFTModule("toy", **{"dtype": "bf16", "execution": Execution(vllm={}), **settings})


def test_a_base_in_fp32_is_refused_when_it_is_loaded(started, llama):
    with pytest.raises(ValueError, match=r"vllm with a base in float32.*set dtype to bf16"):
        make_module(llama, dtype="auto")


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_a_temperature_that_vllm_would_change_is_refused(started, llama, temperature):
    with pytest.raises(ValueError, match=f"temperature={temperature} with vllm: vLLM draws at .* 0.01 to 2"):
        make_module(llama).generate(["a"], temperature=temperature, max_new_tokens=2)


def test_a_rank_above_vllms_is_refused(started, llama):
    with pytest.raises(ValueError, match="rank 513 of LoRA: vLLM takes at most 512"):
        make_module(llama, lora=Lora(rank=513, targets=["q_proj"]))


def test_trained_weights_besides_lora_are_refused(started, llama):
    module = SFTModule(llama, dtype="fp16", execution=Execution(vllm={}))
    load = module.load_base

    def with_trained_norm():
        network, new = load()
        return network, [*new, "model.norm.weight"]

    module.load_base = with_trained_norm
    with pytest.raises(ValueError, match=r"norm.*is trained, but vLLM takes LoRA's A and B alone"):
        module.configure_model()


def test_the_quantized_base_of_a_device_is_refused(started, llama):
    module = make_module(llama)
    base = QuantizedBase(module)
    base.use(8)
    with pytest.raises(ValueError, match=r"device has a quantized base.*weight_bits: 16"):
        module.generate(["a"], max_new_tokens=2)
    base.use(16)
    assert module.generate(["a"], temperature=0, max_new_tokens=2)


def test_without_vllm_the_error_says_how_to_install_it(monkeypatch, llama):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fedlight\[vllm\]'"):
        make_module(llama)


def test_a_dry_run_looks_for_the_package():
    assert SFTModule.requires({"model": "toy", "execution": {"vllm": {}}}) == [
        Model("toy"),
        Package("vllm", "'fedlight[vllm]'"),
    ]
    assert SFTModule.requires({"model": "toy", "execution": {"vllm": None}}) == [Model("toy")]


def test_the_stand_in_has_vllms_own_interface():
    vllm = pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest

    def parameters(function):
        return {name: part.kind for name, part in inspect.signature(function).parameters.items()}

    for own, real in (
        (vllm_stand_in.LLM.__init__, vllm.LLM.__init__),
        (vllm_stand_in.LLM.generate, vllm.LLM.generate),
    ):
        assert parameters(own).items() <= parameters(real).items()
    for own, real in (
        (vllm_stand_in.SamplingParams, vllm.SamplingParams),
        (vllm_stand_in.LoRARequest, LoRARequest),
        (vllm_stand_in.CompletionOutput, vllm.CompletionOutput),
    ):
        assert parameters(own).keys() <= parameters(real).keys()
    engine = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {"enable_lora", "max_lora_rank", "max_loras", "generation_config"} <= engine


@pytest.mark.gpu
@pytest.mark.slow
def test_vllms_greedy_texts_are_those_of_stacked_adapters(larger_llama):
    """On a GPU with vLLM itself; kernels round otherwise, so a rare tie may end a text early."""
    pytest.importorskip("vllm")
    with torch.device("cuda"):
        module = make_module(larger_llama, vllm={"gpu_memory_utilization": 0.2, "enforce_eager": True})
        here = make_module(larger_llama, vllm=None)
    states = [{name: value.cuda() for name, value in own.items()} for own in make_states(module)]
    settings = {"temperature": 0, "max_new_tokens": 16}
    found = module.generate_for(states, PROMPTS, SEEDS, **settings)
    expected = here.generate_for(states, PROMPTS, SEEDS, **settings)
    pairs = [
        (one, two)
        for ours, theirs in zip(found, expected, strict=True)
        for (one,), (two,) in zip(ours, theirs, strict=True)
    ]
    assert len(pairs) == 5
    assert sum(one == two for one, two in pairs) >= 4
    assert len({text for text, _ in pairs}) >= 4
