import pytest
import torch
from adapted import ready
from tuned import tuned

from fedlight.modules.language.adapters import Lora
from fedlight.modules.selector import SelectorModule
from fedlight.modules.sft import SFTModule

PROMPTS = [["the cat", "a dog ran to the park: B day after"], ["c"], [], ["it was a nice", "to", "a mat: A"]]
SEEDS = [3, 4, 5, 3]


def make_states(module, count, seed=1):
    """Return weights under which models write quite different texts."""
    generator = torch.Generator().manual_seed(seed)
    trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    return [
        {name: torch.randn(weight.shape, generator=generator) / 4 for name, weight in trained.items()}
        for _ in range(count)
    ]


def alone(module, states, prompts, seeds, **settings):
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = []
    for state, own, seed in zip(states, prompts, seeds, strict=True):
        module.load_state_dict(before | state)
        found.append(module.generate(own, seed=seed, **settings))
    module.load_state_dict(before)
    return found


@pytest.fixture(scope="module", params=["plain", "nf4"])
def module(request, llama):
    return ready(SFTModule(llama, base=request.param, dtype="fp32", lora=Lora(dropout=0.3))).train()


SETTINGS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.5, "n": 1},
    "copies": {"temperature": 1.0, "n": 3, "top_p": 0.9},
    "stops": {"temperature": 1.0, "stop": ["a", " "], "strip": False},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_texts_are_those_of_one_client_after_the_other(module, settings):
    states, settings = make_states(module, 4), {"max_new_tokens": 12, **settings}
    expected = alone(module, states, PROMPTS, SEEDS, **settings)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    some = next(weight for weight in module.parameters() if weight.requires_grad)
    some.grad = torch.ones_like(some)
    stream = torch.get_rng_state()
    assert module.generate_for(states, PROMPTS, SEEDS, **settings) == expected
    assert torch.equal(torch.get_rng_state(), stream)
    assert torch.equal(some.grad, torch.ones_like(some))
    some.grad = None
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.network.training
    texts = [text for own in expected for copies in own for text in copies]
    assert len(set(texts)) > len(texts) / 2  # the clients' models differ
    # Neither who else is in the batch nor the order changes a client's texts.
    assert module.generate_for(states[3:], PROMPTS[3:], SEEDS[3:], **settings) == expected[3:]
    assert module.generate_for(states[::-1], PROMPTS[::-1], SEEDS[::-1], **settings) == expected[::-1]


def test_a_client_without_weights_of_its_own_has_the_modules(module):
    [own] = make_states(module, 1)
    settings = {"temperature": 0, "max_new_tokens": 8}
    expected = alone(module, [{}, own], PROMPTS[:2], SEEDS[:2], **settings)
    assert module.generate_for([{}, own], PROMPTS[:2], SEEDS[:2], **settings) == expected
    assert module.generate_for([{}, own], [[], []], [1, 2]) == [[], []]


def test_a_model_that_cannot_be_stacked_is_refused(llama):
    module = SFTModule(llama, base="int8", dtype="fp32")
    with pytest.raises(ValueError, match="outlier columns"):
        module.generate_for([{}], [["the"]], [1])


def test_the_active_adapter_writes(llama):
    selectors = SelectorModule(llama, choices=["A", "B"], num_adapters=3, dtype="fp32")
    module = tuned(selectors, 0.25, parts=("lora_",))
    module.use_adapter("adapter1")
    settings = {"temperature": 0, "max_new_tokens": 8}
    expected = module.generate(PROMPTS[0], **settings)
    assert module.generate_for([{}, {}], [PROMPTS[0]] * 2, [0, 0], **settings) == [expected] * 2
    module.use_adapter("adapter2")
    assert module.generate(PROMPTS[0], **settings) != expected
