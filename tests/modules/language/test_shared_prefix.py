from functools import partial

import pytest
import torch
import transformers
from architectures import CONFIGS
from torch import Tensor
from tuned import tuned

from fedlight.devices.cost import CostMeter
from fedlight.devices.shape import BatchShape
from fedlight.modules import DPOModule, RewardModule, SelectorModule, SFTModule
from fedlight.modules.functional import IGNORED
from fedlight.modules.language.adapters import Lora, trained_parameters
from fedlight.modules.language.base_model import Execution
from fedlight.modules.language.readout import SharedPrefix, hidden_states
from fedlight.stacking import StackedAdapters
from fedlight.stacking.shared_rows import pays, plan

KINDS = ("llama", "gpt2", "gemma3", "qwen3", "opt", "gpt_neox")
OTHERS = ("mpt", "bloom", "mamba")  # positions by distance, positions by the mask, no attention


def make_model(config):
    config.initializer_range = 0.2
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for layer in model.modules():
        if type(layer).__name__.endswith("RMSNorm"):
            layer.forward = partial(normalise, layer)
    return model


def normalise(layer, x):
    """RMSNorm in fp64, which transformers computes in fp32 whatever the model's type."""
    eps = layer.eps if hasattr(layer, "eps") else layer.variance_epsilon
    weight = layer.weight + 1 if type(layer).__name__.startswith("Gemma") else layer.weight
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def make_texts(prompts=(70, 80), rests=((40, 50), (30, 17)), vocabulary=97, seed=0) -> dict[str, Tensor]:
    """Return texts of unlike lengths, padded on the right: those of the first rests, then those of the second."""
    stream = torch.Generator().manual_seed(seed)
    starts = [torch.randint(5, vocabulary, (length,), generator=stream) for length in prompts]
    rows = [
        torch.cat([start, torch.randint(5, vocabulary, (length,), generator=stream)])
        for own in rests
        for start, length in zip(starts, own, strict=True)
    ]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    lengths = torch.tensor(prompts).repeat(len(rests))[:, None]
    labels = torch.where(mask.bool() & (torch.arange(ids.shape[1]) >= lengths), ids, IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def make_pairs(**changes) -> dict:
    texts = make_texts(vocabulary=320, **changes)
    halves = zip(*(part.chunk(2) for part in texts.values()), strict=True)
    return {
        side: dict(zip(texts, half, strict=True))
        for side, half in zip(("chosen", "rejected"), halves, strict=True)
    }


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr("fedlight.modules.language.readout.rank_zero_info", lines.append)
    return lines


@pytest.fixture
def widths(monkeypatch):
    """Shapes of all ids that a model has computed."""
    shapes = []

    def compute(causal_lm, input_ids, *rest):
        shapes.append(tuple(input_ids.shape))
        return hidden_states(causal_lm, input_ids, *rest)

    monkeypatch.setattr("fedlight.modules.language.readout.hidden_states", compute)
    return shapes


def ready(kind, folder, prefix="auto", **settings):
    """Return a module whose adapter is not at its start."""
    settings = {"lora": Lora(dropout=0.0), **settings}
    return tuned(kind(folder, dtype="fp32", execution=Execution(prefix=prefix), **settings)).train()


@pytest.mark.parametrize("form", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_shared_rows_equal_a_row_per_text(kind, form, widths):
    config = CONFIGS[kind]()
    config._attn_implementation = form
    model, texts = make_model(config), make_texts()
    given, scored = (texts["input_ids"], texts["attention_mask"]), texts["attention_mask"].bool()
    goal = torch.randn(4, 130, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    shared, found = SharedPrefix("auto"), {}
    for way in (hidden_states, shared.pairs, shared.pairs):
        model.zero_grad()
        states = way(model, *given)
        (states * goal)[scored].sum().backward()
        weights = model.named_parameters()
        found[way] = states[scored], {n: w.grad.clone() for n, w in weights if w.grad is not None}
    # One row for each pair: 70 + 40 + 30 and 80 + 50 + 17 tokens, after a comparison in both forms.
    assert widths == [(4, 130), (2, 147), (2, 147), (2, 147)]
    # Eager attention computes its softmax in fp32 whatever the model's type.
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if form == "sdpa" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found[shared.pairs], found[hidden_states], **tolerance)


@pytest.mark.parametrize("kind", OTHERS)
def test_an_architecture_without_block_masks_keeps_a_row_per_text(kind, said, widths):
    model, texts = make_model(CONFIGS[kind]()), make_texts()
    given, shared = (texts["input_ids"], texts["attention_mask"]), SharedPrefix("auto")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(shared.pairs(model, *given), hidden_states(model, *given))
    assert widths[-1] == (4, 130)
    assert len(widths) == 4  # both forms once, then the plain one twice
    assert len(said) == 1
    assert kind in said[0]
    assert said[0].endswith("so each text has a row")


def test_other_padding_and_texts_beyond_a_window_have_a_row_each(said, widths):
    texts, model = make_texts(), make_model(CONFIGS["llama"]())
    SharedPrefix("auto").pairs(model, texts["input_ids"].flip(1), texts["attention_mask"].flip(1))
    holes = texts["attention_mask"].clone()
    holes[:, 85] = 0
    SharedPrefix("auto").pairs(model, texts["input_ids"], holes)
    assert widths == [(4, 130)] * 2
    assert not said
    config = CONFIGS["gemma3"]()
    config.sliding_window = 129
    SharedPrefix("auto").pairs(make_model(config), texts["input_ids"], texts["attention_mask"])
    assert widths == [(4, 130)] * 3
    assert "sliding_window=129" in said[0]


@pytest.mark.parametrize("kind", [DPOModule, RewardModule])
def test_pairs_of_a_module(kind, long_llama, widths):
    batch, found = make_pairs(), []
    for prefix in ("off", "auto"):
        module = ready(kind, long_llama, prefix)
        if kind is DPOModule:  # the reference as well
            found += [module.reference_log_probs(batch)]
        losses = module.example_losses(batch)
        losses.sum().backward()
        trained = (weight.grad.flatten() for weight in module.parameters() if weight.requires_grad)
        found += [losses.detach(), torch.cat([*trained])]
    half = len(found) // 2
    assert widths.count((2, 147)) == half  # a comparison, and the passes of the policy and the reference
    for expected, values in zip(found[:half], found[half:], strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-3, atol=1e-5)


def side_by_side(module, counts):
    """Return the stack of two clients with the module's own adapter."""
    stacked = StackedAdapters(module, trained_parameters(module))
    stacked.enter([{}, {}], [None, None])
    stacked.set_rows(counts, [3, 4])
    return stacked


def test_pairs_of_clients_side_by_side(long_llama, widths):
    batch, module = make_pairs(), ready(DPOModule, long_llama)
    reference = module.reference_pass(batch)
    alone = [
        module.pair_metrics({s: {n: v[k : k + 1] for n, v in part.items()} for s, part in batch.items()}, row)
        for k, row in enumerate(reference.split(1))
    ]
    stacked = side_by_side(module, [1, 1])
    together = module.pair_metrics(batch, reference)["loss"].detach()
    stacked.leave()
    assert widths[-1] == (2, 147)
    expected = torch.cat([one["loss"].detach() for one in alone])
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-5)


def test_dropout_in_training_keeps_a_row_per_text(long_llama, said):
    batch, losses = make_pairs(), []
    for prefix in ("off", "auto"):
        module = ready(DPOModule, long_llama, prefix, lora=Lora(dropout=0.3))
        with module.dropout_masks.seeded(5):
            losses.append([module.pair_log_probs(batch).detach() for _ in range(2)])
    assert all(torch.equal(one, other) for one, other in zip(*losses, strict=True))
    assert len(said) == 1
    assert "dropout of 0.3" in said[0]
    assert "lora.dropout=0" in said[0]
    module.reference_pass(batch)  # which has no dropout
    assert "in the first batch 2 x 147 tokens in place of 4 x 130" in said[1]


def test_both_orders_of_a_selector(long_llama, said, widths):
    texts = make_texts(prompts=(90, 100), rests=((20, 30), (30, 20)), vocabulary=320)
    order = torch.tensor([0, 2, 1, 3])  # both orders of a comparison are neighbours
    batch = {name: part[order] for name, part in texts.items()} | {"labels": torch.tensor([0, 1, 0, 1])}
    expected = ready(SelectorModule, long_llama, "off").choice_logits(batch)
    module = ready(SelectorModule, long_llama)
    torch.testing.assert_close(module.choice_logits(batch), expected, rtol=1e-4, atol=1e-4)
    assert widths[-1] == (2, 150)
    stacked = side_by_side(module, [2, 2])
    torch.testing.assert_close(module.choice_logits(batch), expected, rtol=1e-4, atol=1e-4)
    stacked.leave()
    assert widths[-1] == (4, 130)
    assert "side by side" in said[-1]


def test_continuations_of_one_prompt(long_llama, widths):
    prompts = ["the cat sat on the mat. " * 12, "a dog ran to the park: B " * 12, "a short one"]
    texts = [[" a dog", " the cat sat", " day after day"], [" A warm", " B soft ones"], [" A mat", " a park"]]
    plain, module = ready(SFTModule, long_llama, "off"), ready(SFTModule, long_llama)
    widths.clear()  # of checks when a model is loaded
    expected, found = (one.log_likelihoods(prompts, texts) for one in (plain, module))
    rows, columns = widths.pop()
    assert widths[0] == widths[1] == (7, 100)  # in a row each, and again for the comparison
    assert rows == 3  # one for each prompt
    assert rows * columns < 0.5 * 7 * 100
    for own, wanted in zip(found, expected, strict=True):
        for one, other in zip(own, wanted, strict=True):
            assert one.log_prob == pytest.approx(other.log_prob, rel=1e-4)
            assert (one.tokens, one.greedy) == (other.tokens, other.greedy)


def test_the_counted_cost_is_that_of_a_row_per_text(long_llama):
    shape = BatchShape(examples=2, tokens=130, responses=40)
    auto, off = (
        CostMeter(ready(DPOModule, long_llama, prefix).skeleton()).cost(shape) for prefix in ("auto", "off")
    )
    assert auto == off


@pytest.mark.parametrize(
    ("prompt", "rest", "texts", "hidden_size", "expected"),
    [
        *((140, 44, 2, 576, True), (32, 32, 2, 576, True)),
        *((70, 300, 2, 576, False), (400, 1500, 2, 576, False)),
        # 11 x 410 = 4,510 tokens become 3,110, but attention sees 3,110^2 pairs instead of 11 x 410^2 = 1,360^2.
        *((140, 270, 11, 64, False), (140, 270, 11, 4096, True)),
    ],
)
def test_rows_are_shared_where_that_saves_time(prompt, rest, texts, hidden_size, expected):
    batch = make_texts(prompts=(prompt,), rests=((rest,),) * texts)
    layout = plan(batch["input_ids"], batch["attention_mask"], [0] * texts)
    assert layout.width == prompt + texts * rest
    assert pays(texts, prompt + rest, layout, hidden_size) is expected


@pytest.mark.parametrize(
    ("common", "in_pairs", "is_shared"),
    [(31, True, False), (32, True, True), (63, False, False), (64, False, True)],
)
def test_a_pair_shares_fewer_tokens_than_neighbours_do(common, in_pairs, is_shared):
    texts = make_texts(prompts=(common,), rests=((9,), (9,)))
    texts["input_ids"][:, common] = torch.tensor([3, 4])  # where they part
    packed = SharedPrefix("auto")._pack(
        make_model(CONFIGS["llama"]()), texts["input_ids"], texts["attention_mask"], in_pairs
    )
    assert (packed is not None) == is_shared


def test_an_unknown_setting_is_refused(long_llama):
    with pytest.raises(ValueError, match="prefix='on'"):
        DPOModule(long_llama, execution=Execution(prefix="on"))
