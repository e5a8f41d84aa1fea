from contextlib import contextmanager

import pytest
import torch
from nested import datamodule
from tiny_world import make_model

from fedlight import Lora, Partition, SFTModule
from fedlight.datamodules.synthesis.datamodule import SyntheticInstructionDataModule, score_candidates
from fedlight.datamodules.synthesis.prompts import InstructionPrompt, ResponsePrompt, SelfGenerationPrompts
from fedlight.datamodules.synthesis.self_generation import NewInstructions, NewResponses, SelfGeneration
from fedlight.datamodules.text.templates import Template

TEMPLATE, ASKED = "POST : {instruction} {input}\nCHOICE :", "POST : {instruction}\nCHOICE :"
EXAMPLE = TEMPLATE + " {response}\n"
PROMPTS = SelfGenerationPrompts(
    InstructionPrompt("", EXAMPLE, "POST :", ("CHOICE",), "(?P<instruction>.*)"),
    ResponsePrompt("", EXAMPLE, EXAMPLE, ASKED, ("POST",), "(?P<response>.+)", no_input="none"),
)


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    built = SFTModule(make_model(tmp_path_factory.mktemp("model")), dtype="fp32")
    built.configure_model()
    # an adapter that does nothing would hide that it is forgotten
    for name, weight in built.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3, generator=torch.Generator().manual_seed(1))
    return built


def synthesis(tries=None, min_words=1, **changes):
    instructions = NewInstructions(max_new_tokens=6, min_words=min_words, tries=tries)
    settings = {"number": 5, "prompts": PROMPTS, "keep_cut": True, "max_rouge_l": 1.0, "batch_size": 64}
    settings |= {"instructions": instructions, "responses": NewResponses(max_new_tokens=4)}
    return SelfGeneration(**(settings | changes))


def data(module, made_by, tmp_path, **options):
    columns = {"instruction": "instruction", "input": "input", "response": "output", "client": "client"}
    settings = {"columns": columns, "template": TEMPLATE, "partition": Partition("client"), "val_share": 0.0}
    settings |= {"tokenizer": module.options.model, "max_tokens": 128, "batch_size": 4, **options}
    settings["synthesis_folder"] = str(tmp_path / "made")
    source = "toy:instructions?num_clients=3&client_rows=12"
    built = datamodule(SyntheticInstructionDataModule, source, made_by, **settings)
    built.setup("fit")
    return built


@pytest.fixture
def counted(module, monkeypatch):
    sizes = []
    generate = module.generate

    def counting(prompts, *args, **kwargs):
        sizes.append(len(prompts))
        return generate(prompts, *args, **kwargs)

    monkeypatch.setattr(module, "generate", counting)
    return sizes


def test_batches_write_what_is_written_one_by_one(module, tmp_path, counted):
    rows = data(module, synthesis(), tmp_path).client_rows

    def made(rows, **changes):
        by = synthesis(**changes)
        return by.make(rows, Template.named(TEMPLATE), module, seed=4), by

    together, by = made(rows)
    batched = list(counted)
    alone, _ = made(rows, batch_size=1)
    assert together == alone
    assert sum(map(len, together.values())) > 5
    assert by.counts["tried"] > 15  # in more than one pass
    assert counted[len(batched) :] == [1] * sum(batched)
    assert {client: made({client: own})[0][client] for client, own in rows.items()} == together
    counted.clear()
    made(rows, tries=5)  # one pass
    assert counted == batched[: len(counted)]
    assert counted[:3] == [5] * 3  # of each client; then up to three times those that have no response yet
    assert len(counted) <= 3 * (1 + 3)


def test_no_random_stream_and_no_mode_is_changed(module, tmp_path):
    built = data(module, synthesis(temperature=1.0), tmp_path, keep=2)
    module.train()
    before = torch.get_rng_state()
    built.synthesize(0, ["c0", "c2"], module)
    built.choose("c0", module)
    assert torch.equal(torch.get_rng_state(), before)
    assert module.training
    assert all(part.training for part in module.modules())


def loss(module, prompt, response):
    """The mean loss of the response's tokens, by transformers itself, of one example alone."""
    tokenizer = module.tokenizer
    ids = tokenizer(prompt + response, return_tensors="pt", add_special_tokens=False)["input_ids"]
    length = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    if not prompt:  # this tokenizer puts no opening token; the first one of a text needs something before it
        ids, length = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids], dim=1), 1
    labels = ids.clone()
    labels[:, :length] = -100
    with torch.no_grad():
        return float(module.causal_lm(input_ids=ids, labels=labels).loss)


@pytest.mark.parametrize("score", ["ifs", "ppl", "ifd"])
def test_scores_are_those_of_transformers_own_loss_one_by_one(module, tmp_path, score):
    module.eval()
    built = data(module, synthesis(temperature=1.0), tmp_path)
    built.synthesize(0, ["c0", "c1"], module)
    candidates = built._pool.candidates["c0"] + built._pool.candidates["c1"]
    assert len({len(one.fields["response"]) for one in candidates}) > 1
    found = score_candidates(score, candidates, built.template, module, seed=0)
    for candidate, value in zip(candidates, found, strict=True):
        prompt, response = built.template.render(candidate.fields).text, " " + candidate.fields["response"]
        conditional, alone = loss(module, prompt, response), loss(module, "", response)
        expected = {"ppl": torch.tensor(conditional).exp()}.get(score, conditional / alone)
        assert value == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("base", ["plain", "int8"])  # of int8 one client writes after the other
def test_candidates_are_those_of_one_client_after_the_other(base, tiny_model, tmp_path):
    module = SFTModule(tiny_model, base=base, dtype="fp32", lora=Lora(rank=2, dropout=0.1))
    module.configure_model()

    def made_in(name):
        return data(module, synthesis(batch_size=3, temperature=3.0), tmp_path / name, keep=2)

    calls, write = [], module.causal_lm.generate
    module.causal_lm.generate = lambda **inputs: calls.append(len(inputs["input_ids"])) or write(**inputs)
    generator = torch.Generator().manual_seed(1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    states = [{name: torch.randn(value.shape, generator=generator) / 4 for name, value in before.items()}] * 2

    @contextmanager
    def holding(state):
        module.load_state_dict(before | state)
        yield
        module.load_state_dict(before)

    one, other = made_in("one"), made_in("other")
    states = dict(zip(one.client_sizes(), [*states, {}], strict=True))
    for client, state in states.items():
        with holding(state):
            one.synthesize(2, [client], module)
    alone = len(calls)
    calls.clear()
    stream = torch.get_rng_state()
    other.synthesize_by_own_models(2, states, module, holding)
    assert torch.equal(torch.get_rng_state(), stream)
    assert alone > 6
    assert len(calls) == alone if base == "int8" else len(calls) < 0.6 * alone

    [file] = (tmp_path / "one/made").iterdir()
    assert (tmp_path / "other/made" / file.name).read_bytes() == file.read_bytes()
    assert len({str(part.candidates) for part in other._parts}) == 3
    assert one.synthesis_metrics() == other.synthesis_metrics()
    assert {client: other.num_synthetic(client) for client in states} == dict.fromkeys(states, 2)

    calls.clear()
    again = made_in("other")
    again.synthesize_by_own_models(2, states, module, holding)  # read
    assert not calls
    assert again.synthesis_metrics() == one.synthesis_metrics()
