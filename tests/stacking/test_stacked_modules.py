import copy

import pytest
import torch
from tiny_world import make_encoder, make_model

from fedlight.devices.quantization import QuantizedBase
from fedlight.modules import DPOModule, RewardModule, SelectorModule, SFTModule
from fedlight.modules.functional import IGNORED
from fedlight.modules.language.adapters import Lora
from fedlight.stacking import StackedAdapters


def make_texts(count, length, generator):
    """Return ``input_ids``, ``attention_mask`` and ``labels`` of texts of unlike lengths, padded on the right."""
    ids = torch.randint(4, 18, (count, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (count,), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    labels = torch.where((mask == 1) & (torch.arange(length) >= 2), ids, IGNORED)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def choices(count, length, generator):
    return {**make_texts(count, length, generator), "labels": torch.randint(2, (count,), generator=generator)}


def pairs(count, length, generator):
    return {
        side: make_texts(count, length + extra, generator) for side, extra in (("chosen", 0), ("rejected", 2))
    }


def pad_and_join(parts):
    """Return the rows of all batches, padded on the right to the longest."""
    if isinstance(parts[0], dict):
        fillers = {"labels": IGNORED}
        joined = {}
        for name in parts[0]:
            values = [part[name] for part in parts]
            if not isinstance(values[0], dict) and values[0].dim() == 2:
                width, filler = max(value.shape[1] for value in values), fillers.get(name, 0)
                values = [torch.nn.functional.pad(v, (0, width - v.shape[1]), value=filler) for v in values]
            joined[name] = pad_and_join(values)
        return joined
    return torch.cat(parts)


KINDS = {
    "sft": (SFTModule, make_texts, "llama", {}),
    "selector": (SelectorModule, choices, "llama", {"choices": ["A", "B"]}),
    "classifier": (SelectorModule, choices, "bert", {"head": "classifier"}),
    "dpo": (DPOModule, pairs, "llama", {"beta": 0.5}),
    "reward": (RewardModule, pairs, "llama", {}),
    "encoder reward": (RewardModule, pairs, "bert", {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {
        "llama": make_model(tmp_path_factory.mktemp("llama")),
        "bert": make_encoder(tmp_path_factory.mktemp("bert")),
    }


def make_module(models, kind, **settings):
    cls, make_batch, model, own = KINDS[kind]
    settings = {"dtype": "fp32", "lora": Lora(rank=2, dropout=0.2), "seed": 1, **own, **settings}
    module = cls(models[model], **settings)
    module.configure_model()
    return module.train(), make_batch


def trained(module):
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def make_starts(module, adapters):
    generator = torch.Generator().manual_seed(3)
    starts = []
    for adapter in adapters:
        own = {n: w for n, w in trained(module).items() if adapter is None or f".{adapter}." in n}
        starts.append({n: w.detach() + torch.randn(w.shape, generator=generator) / 8 for n, w in own.items()})
    return starts


def step_alone(module, start, adapter, batches, make_optimizer):
    """Return losses of each step and the trained parameters of one client in a copy of the module."""
    module = copy.deepcopy(module)
    if adapter is not None:
        module.use_adapter(adapter)
    with torch.no_grad():
        for name, value in start.items():
            trained(module)[name].copy_(value)
    optimizer, losses = make_optimizer(trained(module).values()), []
    for batch in batches:
        optimizer.zero_grad()
        with module.dropout_masks.seeded(module.dropout_seed(batch)):
            found = module.example_losses(batch)
        found.mean().backward()
        optimizer.step()
        losses.append(found.detach())
    return losses, {name: weight.detach() for name, weight in trained(module).items() if name in start}


def all_alone(module, starts, adapters, batches, make_optimizer):
    clients = zip(starts, adapters, batches, strict=True)
    return [step_alone(module, *client, make_optimizer) for client in clients]


def step_together(module, starts, adapters, batches, make_optimizer):
    """Do the same for all clients at once; ``batches`` has one list of batches for each client."""
    optimizer, losses = make_optimizer(trained(module).values()), []
    stacked = StackedAdapters(module, trained(module))
    stacked.enter(starts, adapters)
    for parts in zip(*batches, strict=True):
        counts = [len(module_rows(part)) for part in parts]
        stacked.set_rows(counts, [module.dropout_seed(part) for part in parts])
        optimizer.zero_grad()
        found = module.example_losses(pad_and_join(parts)).split(counts)
        sum(own.mean() for own in found).backward()
        optimizer.step()
        losses.append([own.detach() for own in found])
    return losses, stacked.leave()


def module_rows(batch):
    return batch["chosen"]["input_ids"] if "chosen" in batch else batch["input_ids"]


CLIENTS = {"equal": (2, 2, 2), "unequal": (1, 3, 2)}
OPTIMIZERS = {
    "SGD": (lambda weights: torch.optim.SGD(weights, lr=0.01), 1e-5),
    "AdamW": (lambda weights: torch.optim.AdamW(weights, lr=1e-3), 1e-4),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("counts", CLIENTS.values(), ids=CLIENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_clients_side_by_side_train_as_one_after_the_other(models, kind, counts, optimizer):
    module, make_batch = make_module(models, kind)
    generator = torch.Generator().manual_seed(4)
    batches = [
        [make_batch(n, 6 + 2 * k + step, generator) for step in range(2)] for k, n in enumerate(counts)
    ]
    starts = make_starts(module, [None] * 3)
    make_optimizer, tolerance = OPTIMIZERS[optimizer]
    expected = all_alone(module, starts, [None] * 3, batches, make_optimizer)
    losses, states = step_together(module, starts, [None] * 3, batches, make_optimizer)
    for k, (own_losses, weights) in enumerate(expected):
        for step, own in enumerate(own_losses):
            torch.testing.assert_close(losses[step][k], own, rtol=1e-4, atol=1e-5)
        moved = max(float((weights[name] - value).abs().max()) for name, value in starts[k].items())
        assert moved > 10 * tolerance
        for name, value in weights.items():
            # A reward's bias cancels out of the loss: its gradient is rounding alone, which AdamW makes a whole step of.
            if name.endswith("classifier.modules_to_save.default.bias") and kind == "encoder reward":
                continue
            assert float((states[k][name] - value).abs().max()) < tolerance, name


@pytest.mark.parametrize("kind", ["selector", "classifier"])
def test_clients_train_different_selectors_side_by_side(models, kind):
    module, make_batch = make_module(models, kind, num_adapters=3)
    adapters, generator = ("adapter2", "adapter0", "adapter2"), torch.Generator().manual_seed(5)
    batches = [[make_batch(2, 7, generator)] for _ in adapters]
    starts = make_starts(module, adapters)
    make_optimizer, tolerance = OPTIMIZERS["SGD"]
    before = {name: weight.detach().clone() for name, weight in trained(module).items()}
    expected = all_alone(module, starts, adapters, batches, make_optimizer)
    _, states = step_together(module, starts, adapters, batches, make_optimizer)
    for state, (_, weights), adapter in zip(states, expected, adapters, strict=True):
        assert state.keys() == weights.keys()
        assert all(f".{adapter}." in name for name in state)
        assert all(float((state[name] - value).abs().max()) < tolerance for name, value in weights.items())
    assert all(torch.equal(weight, before[name]) for name, weight in trained(module).items())


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_an_nf4_base_is_shared(models, kind):
    module, make_batch = make_module(models, kind, base="nf4")
    generator = torch.Generator().manual_seed(6)
    batches = [[make_batch(2, 8, generator)] for _ in range(3)]
    starts = make_starts(module, [None] * 3)
    make_optimizer, tolerance = OPTIMIZERS["SGD"]
    expected = all_alone(module, starts, [None] * 3, batches, make_optimizer)
    _, states = step_together(module, starts, [None] * 3, batches, make_optimizer)
    for state, (_, weights) in zip(states, expected, strict=True):
        assert all(float((state[name] - value).abs().max()) < tolerance for name, value in weights.items())


def test_an_int8_base_is_refused(models):
    """On a device only ``forward`` of the base's layers changes, and its NF4 base is taken."""
    module, _ = make_module(models, "sft", base="int8")
    with pytest.raises(ValueError, match=r"int8 layer .*picks its outlier columns.*model.base=nf4 or plain"):
        StackedAdapters(module, trained(module))
    module, _ = make_module(models, "sft")
    quantized = QuantizedBase(module)
    quantized.use(8)
    with pytest.raises(ValueError, match="int8 layer"):
        StackedAdapters(module, trained(module))
    quantized.use(4)
    StackedAdapters(module, trained(module))
    quantized.use(16)
    StackedAdapters(module, trained(module))


@pytest.mark.parametrize("counts", [(2, 2), (1, 3)])
def test_activations_computed_twice_have_the_same_dropout(models, counts):
    module, make_batch = make_module(models, "sft")
    batches = [[make_batch(n, 8, torch.Generator().manual_seed(k))] for k, n in enumerate(counts)]
    starts, (make_optimizer, _) = make_starts(module, [None] * 2), OPTIMIZERS["SGD"]
    _, kept = step_together(module, starts, [None] * 2, batches, make_optimizer)
    _, alone = step_alone(module, starts[0], None, batches[0], make_optimizer)
    module.checkpoint_gradients(True)
    _, twice = step_together(module, starts, [None] * 2, batches, make_optimizer)
    _, alone_twice = step_alone(module, starts[0], None, batches[0], make_optimizer)
    assert all(torch.equal(value, twice[k][name]) for k in range(2) for name, value in kept[k].items())
    assert all(torch.equal(value, alone_twice[name]) for name, value in alone.items())
