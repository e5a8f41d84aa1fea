import copy
from contextlib import contextmanager

import pytest
import torch
from refusals import refusal
from torch import nn

from fedlight.devices.quantization import QuantizedBase
from fedlight.modules import SFTModule
from fedlight.modules.language.adapters import Lora
from fedlight.stacking import StackedAdapters
from fedlight.stacking.fast_layers import fuse_lora

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
OPT = {"hidden_size": 16, "ffn_dim": 24, "num_attention_heads": 2, "word_embed_proj_dim": 16, "dropout": 0.0}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPT_LAYERS = ("q_proj", "fc1", "fc2")


def make_network(adapters=("default",), dtype=torch.float64, seed=0, **lora):
    """Return a Llama, or with layers of OPT an OPT, with LoRA adapters whose weights are all random, B as well."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

    torch.manual_seed(seed)
    form = {"num_hidden_layers": 2, "vocab_size": 40, "max_position_embeddings": 32}
    is_opt = "fc1" in lora.get("target_modules", ())
    config = OPTConfig(**OPT, **form) if is_opt else LlamaConfig(**SIZES, **form)
    network = AutoModelForCausalLM.from_config(config).to(dtype)
    settings = {"r": 3, "lora_alpha": 5, "target_modules": list(LAYERS), **lora}
    network = get_peft_model(network, LoraConfig(**settings), adapter_name=adapters[0])
    for adapter in adapters[1:]:
        network.add_adapter(adapter, LoraConfig(**settings))
    for name, weight in network.named_parameters():
        weight.requires_grad_("lora_" in name)
        if "lora_" in name:
            weight.data = torch.randn_like(weight, dtype=torch.promote_types(dtype, torch.float32)) / 4
    return network.train()


def trained(network):
    return {name: weight for name, weight in network.named_parameters() if weight.requires_grad}


def make_starts(network, adapters, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            name: torch.randn(weight.shape, generator=generator) / 4
            for name, weight in trained(network).items()
            if adapter is None or f".{adapter}." in name
        }
        for adapter in adapters
    ]


def make_texts(counts, length=7, tiles=1, seed=2):
    """Return token ids of each client, ``(tiles * count, tokens)``."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(40, (tiles * count, length), generator=generator) for count in counts]


def join_texts(texts, tiles=1):
    """Return one batch: the first tile of every client, then the second."""
    return torch.cat([part.chunk(tiles)[tile] for tile in range(tiles) for part in texts])


@contextmanager
def stack(network, starts, counts, adapters=None, seeds=None):
    """Stack the adapters of clients that have so many rows, until the block ends."""
    stacked = StackedAdapters(network, trained(network))
    stacked.enter(starts, adapters or [None] * len(starts))
    stacked.set_rows(counts, seeds)
    yield stacked
    stacked.leave()


def row_losses(network, ids):
    logits = network(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(dim=1)


def joint_loss(network, texts, tiles=1):
    """Return the sum over clients of each client's mean."""
    losses = row_losses(network, join_texts(texts, tiles)).view(tiles, -1)
    parts = losses.split([len(part) // tiles for part in texts], dim=1)
    return sum(part.mean() for part in parts), [part.detach() for part in parts]


def alone(network, start, adapter, ids):
    """Return losses and gradients of one client with plain PEFT."""
    network = copy.deepcopy(network)
    if adapter is not None:
        network.set_adapter(adapter)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if name in start:
                weight.copy_(start[name])
    losses = row_losses(network, ids)
    losses.mean().backward()
    return losses.detach(), {
        name: weight.grad for name, weight in trained(network).items() if weight.grad is not None
    }


CASES = {
    "equal counts": {"counts": (2, 2, 2)},
    "one example each": {"counts": (1, 1)},
    "unequal counts": {"counts": (3, 1, 2)},
    "one client": {"counts": (4,)},
    "pairs": {"counts": (2, 2, 2), "tiles": 2},
    "unequal pairs": {"counts": (1, 3), "tiles": 2},
    "adapters": {"counts": (2, 2, 2), "adapters": ("two", "one", "two")},
    "unequal adapters": {"counts": (2, 3), "adapters": ("two", "three")},
    "ranks by layer": {
        "counts": (2, 2),
        "rank_pattern": {"v_proj": 1, "up_proj": 4},
        "alpha_pattern": {"v_proj": 7},
    },
    "rank-stabilized": {"counts": (2, 2), "use_rslora": True},
    "bias of B": {"counts": (2, 1), "lora_bias": True},
    "tokens in one dimension": {"counts": (2, 2), "target_modules": OPT_LAYERS},
    "unequal tokens in one dimension": {"counts": (1, 3), "tiles": 2, "target_modules": OPT_LAYERS},
}


@pytest.mark.filterwarnings("ignore:.*lora_bias=True.*")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_and_gradients_are_those_of_one_client_at_a_time(case, dtype):
    case = dict(case)
    counts, tiles = case.pop("counts"), case.pop("tiles", 1)
    adapters = case.pop("adapters", (None,) * len(counts))
    named = sorted({name for name in adapters if name}) or ["default"]
    network = make_network(named, dtype, **case)
    starts, texts = make_starts(network, adapters), make_texts(counts, tiles=tiles)
    expected = [alone(network, *one) for one in zip(starts, adapters, texts, strict=True)]

    before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    parameters = trained(network)
    stacked = StackedAdapters(network, parameters)
    stacked.enter(starts, adapters)
    stacked.set_rows(counts, None)
    loss, losses = joint_loss(network, texts, tiles)
    loss.backward()
    tolerance = {"rtol": 1e-11, "atol": 1e-13} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    for k, (own_losses, gradients) in enumerate(expected):
        torch.testing.assert_close(losses[k].flatten(), own_losses, **tolerance)
        found = stacked.gradients(k)
        assert found.keys() == gradients.keys()
        assert len(found) >= 12
        for name, gradient in gradients.items():
            assert gradient.abs().max() > 0
            torch.testing.assert_close(found[name], gradient, **tolerance)
    assert all(network.get_parameter(name) is weight for name, weight in parameters.items())

    states = stacked.leave()
    for state, start in zip(states, starts, strict=True):
        assert state.keys() <= start.keys()
        assert all(torch.equal(value, start[name]) for name, value in state.items())
        assert all(value.dtype == torch.float32 for value in state.values())
    for name, weight in network.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.grad is None
    assert not any("forward" in vars(layer) for layer in network.modules())


def write(weights, start):
    with torch.no_grad():
        for name, value in start.items():
            weights[name].copy_(value)


def gradients_of(stacked, k):
    return {name: value.clone() for name, value in stacked.gradients(k).items()}


@pytest.mark.parametrize("kind", ["bf16 base", "fused bf16 base", "autocast"])
@pytest.mark.parametrize("counts", [(2, 2), (1, 3)])
def test_casts_are_those_of_peft(kind, counts):
    """Errors against fp32 are no larger than those of one client at a time."""
    autocast, fused = kind == "autocast", kind == "fused bf16 base"
    # Scaled by 2, the factor is rounded in no form.
    network = make_network(dtype=torch.float32 if autocast else torch.bfloat16, lora_alpha=6 if fused else 5)
    if fused:
        fuse_lora(network)
    assert {weight.dtype for weight in trained(network).values()} == {torch.float32}
    starts, texts = make_starts(network, [None] * 2), make_texts(counts)
    layer = network.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    inputs = [torch.randn(count, 5, 16).to(torch.float32 if autocast else torch.bfloat16) for count in counts]
    stacked = StackedAdapters(network, trained(network))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = [alone(network, *one) for one in zip(starts, [None] * 2, texts, strict=True)]
        network_alone = copy.deepcopy(network).float()
        results = []
        for start, x in zip(starts, inputs, strict=True):
            single = copy.deepcopy(network)
            write(trained(single), start)
            results.append(single.get_submodule("base_model.model.model.layers.0.mlp.up_proj")(x))
        stacked.enter(starts, [None] * 2)
        stacked.set_rows(counts, None)
        result = layer(torch.cat(inputs))
        loss, losses = joint_loss(network, texts)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, torch.cat(results), rtol=2**-5, atol=2**-6)
    if kind == "bf16 base":  # in the others A and B are rounded, and sums and products in another order
        assert (result == torch.cat(results)).float().mean() > 0.95
    loss.backward()
    exact = [alone(network_alone, *one)[1] for one in zip(starts, [None] * 2, texts, strict=True)]
    own, found = ([], [])
    for k, (own_losses, gradients) in enumerate(expected):
        torch.testing.assert_close(losses[k][0], own_losses, rtol=0.02, atol=0.02)
        for name, gradient in stacked.gradients(k).items():
            assert gradient.dtype == torch.float32
            for errors, value in ((own, gradients[name]), (found, gradient)):
                errors.append(float((value - exact[k][name]).norm() / exact[k][name].norm()))
    if fused and counts == (2, 2):
        assert found == own
    assert 0 < sum(found) < (2 if fused else 1.1) * sum(own)
    assert max(found) < 2 * max(own)
    stacked.leave()


def test_a_step_keeps_no_copy_of_the_inputs():
    """Kept of each LoRA layer are its input, which it shares with others, the product with A, and B transposed."""
    network = make_network(dtype=torch.float32)
    texts = make_texts((2, 2))

    def kept():
        sizes: dict[int, int] = {}

        def pack(value):
            sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            joint_loss(network, texts)
        return sum(sizes.values())

    plain = kept()
    with stack(network, make_starts(network, [None] * 2), (2, 2)):
        weights = sum(weight[0].nbytes for weight in trained(network).values())
        assert kept() <= plain + 2 * weights


def test_disabled_adapters_leave_the_base():
    network = make_network()
    [ids] = make_texts((4,))
    with torch.no_grad(), network.disable_adapter():
        expected = row_losses(network, ids)
    with torch.no_grad(), stack(network, make_starts(network, [None] * 2), (2, 2)):
        with network.disable_adapter():
            assert torch.equal(row_losses(network, ids[:3]), expected[:3])
        assert not torch.equal(row_losses(network, ids), expected)


def test_rows_of_something_else_are_refused():
    network = make_network()
    with stack(network, make_starts(network, [None] * 2), (2, 2)) as stacked:
        with refusal(r"q_proj got an input of shape \(3, 7, 16\).* 4 examples of 2 clients"):
            row_losses(network, torch.zeros(3, 7, dtype=torch.int64))
        with refusal(r"counts=\[2\].* 2 clients"):
            stacked.set_rows((2,), None)
        with refusal("at least one example"):
            stacked.set_rows((2, 0), None)
    network = make_network(target_modules=["fc1"])  # nothing tells which tokens are one text
    with (
        stack(network, make_starts(network, [None] * 2), (2, 2)),
        refusal(r"fc1 got an input of shape \(28, 16\)"),
    ):
        row_losses(network, torch.zeros(4, 7, dtype=torch.int64))


LAYER = "base_model.model.model.layers.1.mlp.up_proj"
REFUSED = {
    "DoRA": ({"use_dora": True}, None, "adapter of the kind Dora.*clients_at_once to 1"),
    "embedding": (
        {"target_modules": ["q_proj", "embed_tokens"]},
        None,
        "embed_tokens is a LoRA adapter on a layer of type Embedding",
    ),
    "norm": (
        {},
        lambda network: network.base_model.model.model.norm.requires_grad_(),
        "norm.weight is trained, the weight of a layer of type LlamaRMSNorm.*clients_at_once to 1",
    ),
    "merged": (
        {},
        lambda network: network.merge_adapter(),
        "merged into its weights: call unmerge_adapter",
    ),
    "replaced": (
        {},
        lambda network: setattr(
            network.get_submodule(LAYER), "forward", network.get_submodule(LAYER).forward
        ),
        r"forward of .*layers\.1\.mlp\.up_proj was replaced",
    ),
    "batch norm": (
        {},
        lambda network: network.add_module("extra", nn.BatchNorm1d(3).requires_grad_(False)),
        "extra is batch normalization",
    ),
    "channel dropout": (
        {},
        lambda network: network.add_module("extra", nn.Dropout1d(0.1)),
        "extra is a Dropout1d",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("lora", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stacked_is_refused_by_name(lora, change, message):
    network = make_network(**lora)
    if change is not None:
        change(network)
    with refusal(message):
        StackedAdapters(network, trained(network))


def test_an_int8_base_is_refused():
    """On a device only ``forward`` of the base's layers changes, and its NF4 base is taken."""

    def make(**base):
        module = SFTModule("toy", lora=Lora(rank=2), dtype="fp32", **base)
        module.configure_model()
        return module

    module, message = make(base="int8"), r"int8 layer .*picks its outlier columns.*model.base=nf4 or plain"
    with refusal(message):
        StackedAdapters(module, trained(module))
    module = make()
    quantized = QuantizedBase(module)
    quantized.use(8)
    with refusal("int8 layer"):
        StackedAdapters(module, trained(module))
    quantized.use(4)
    StackedAdapters(module, trained(module))
    quantized.use(16)
    StackedAdapters(module, trained(module))


def test_adapters_that_are_not_alike_are_refused():
    from peft import LoraConfig

    network = make_network(("one",))
    network.add_adapter("two", LoraConfig(r=2, target_modules=list(LAYERS)))
    network.add_adapter("three", LoraConfig(r=3, lora_dropout=0.5, target_modules=list(LAYERS)))
    for name, weight in network.named_parameters():
        weight.requires_grad_("lora_" in name)
    stacked = StackedAdapters(network, trained(network))
    with refusal("same layers and ranks"):
        stacked.enter([{}, {}], ["one", "two"])
    with refusal(r"drops \[0.0, 0.5\]"):
        stacked.enter([{}, {}], ["one", "three"])
    assert not stacked.clients
    network.base_model.set_adapter(["one", "three"])
    with refusal("one, three are active at once"):
        stacked.enter([{}, {}], [None, None])


def test_torchs_dropout_draws_for_each_client_alone():
    """In a user's own model: dropout of adapters and of the base. Who else is in the batch changes nothing."""
    network = make_network(lora_dropout=0.4)
    layers = network.get_base_model().model.layers
    layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.3))
    starts, texts, seeds = make_starts(network, [None] * 3), make_texts((2, 1, 2)), [7, 8, 9]

    def gradients(clients, shift=0):
        own_starts, own_texts = [starts[k] for k in clients], [texts[k] for k in clients]
        own_seeds = [seeds[k] + shift for k in clients]
        with stack(network, own_starts, list(map(len, own_texts)), seeds=own_seeds) as stacked:
            joint_loss(network, own_texts)[0].backward()
            return [gradients_of(stacked, at) for at in range(len(clients))]

    together = gradients([0, 1, 2])
    for own, other in ((together[1], gradients([1])[0]), (together[2], gradients([2, 0])[0])):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-13)
    changed = gradients([1], shift=1)[0]
    assert all(not torch.allclose(gradient, changed[name]) for name, gradient in together[1].items())
    network.eval()
    expected = alone(network, starts[0], None, texts[0])[0]
    with stack(network, starts[:1], [2], seeds=[7]):
        torch.testing.assert_close(joint_loss(network, texts[:1])[1][0].flatten(), expected)
