import pytest
import torch
from torch import nn

from fedlight.federation.lora.pairs import LoraPair, find_pairs, pad_to, slice_to_rank


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.q, self.k = nn.Embedding(7, 5), nn.Linear(5, 3), nn.Linear(5, 4)
        self.conv, self.head = nn.Conv1d(5, 6, 3), nn.Linear(3, 2)


def trained(adapters=("default",), layers=("q", "k"), **settings):
    """Trained tensors of PEFT's own layers, by PEFT's own names."""
    from peft import LoraConfig, get_peft_model

    def config():
        return LoraConfig(r=2, target_modules=list(layers), modules_to_save=["head"], **settings)

    network = get_peft_model(Layers(), config(), adapter_name=adapters[0])
    for name in adapters[1:]:
        network.add_adapter(name, config())
    named = [(name, p.detach()) for name, p in network.named_parameters()]
    found = {name: value for name, value in named if {*adapters} & {*name.split(".")}}
    assert len(found) >= 2 * len(adapters)
    return found


def test_the_pairs_of_linear_layers_with_the_default_adapter():
    state = trained()
    found = find_pairs(state)
    layers = ["base_model.model.k", "base_model.model.q"]
    assert found.pairs == [
        LoraPair(f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight", layer, "default")
        for layer in layers
    ]
    assert [tuple(state[pair.a].shape) for pair in found.pairs] == [(2, 5), (2, 5)]
    assert [tuple(state[pair.b].shape) for pair in found.pairs] == [(4, 2), (3, 2)]
    assert found.others == {}  # a trained head is none of LoRA's
    turned = {name: state[name].to("meta") for name in reversed(state)}
    assert find_pairs(turned) == found
    biased = trained(lora_bias=True)  # a bias of B is a tensor like others
    assert "base_model.model.q.lora_B.default.bias" in biased
    assert find_pairs(biased) == found
    saved = {"q.lora_A.weight": torch.ones(2, 5), "q.lora_B.weight": torch.ones(3, 2)}  # without an adapter
    assert find_pairs(saved).pairs == [LoraPair("q.lora_A.weight", "q.lora_B.weight", "q", "")]


def test_several_adapters_are_pairs_of_their_own():
    found = find_pairs(trained(["adapter0", "adapter1"])).pairs
    assert [(pair.layer[-1], pair.adapter) for pair in found] == [
        ("k", "adapter0"), ("k", "adapter1"), ("q", "adapter0"), ("q", "adapter1"),
    ]  # fmt: skip
    assert all(pair.adapter in pair.a and pair.adapter in pair.b for pair in found)


def test_an_embedding_is_a_pair_whose_product_is_the_transpose_of_what_is_added():
    [pair] = find_pairs(state := trained(layers=["table"])).pairs
    assert pair.a == "base_model.model.table.lora_embedding_A.default"
    assert tuple(pair.product(state).shape) == (5, 7)


def test_what_is_no_plain_pair_is_passed_over_with_its_reason():
    found = find_pairs(trained(layers=["conv", "q"]))
    assert [pair.layer[-1] for pair in found.pairs] == ["q"]
    assert {*found.others.values()} == {
        "base_model.model.conv has factors of 3 and 3 dimensions, as a convolution's, and not matrices"
    }
    dora = find_pairs(trained(use_dora=True))
    assert dora.pairs == []
    assert dora.others["base_model.model.q.lora_A.default.weight"] == (
        "base_model.model.q has a lora_magnitude_vector beside its factors"
    )
    alone = {"q.lora_B.mine.weight": torch.ones(3, 2)}
    assert find_pairs(alone).others == {"q.lora_B.mine.weight": "q has no lora_A of adapter mine"}
    merged = {"q.lora_A": torch.ones(4, 5), "q.lora_B": torch.ones(6, 2)}  # two layers in one
    assert "A of (4, 5) and B of (6, 2), which cannot be multiplied" in find_pairs(merged).others["q.lora_A"]
    adalora = {f"q.lora_{one}.default": torch.ones(2, 2) for one in "ABE"}
    assert (find_pairs(adalora).pairs, {*find_pairs(adalora).others}) == ([], {*adalora})
    assert find_pairs({"lora_head.weight": torch.ones(2, 2)}).others == {}  # a name alone makes no adapter


def test_a_slice_has_the_product_of_the_first_rows_and_columns_and_padding_changes_no_product():
    state = {name: torch.randn(value.shape) for name, value in trained().items()}
    pairs = find_pairs(state).pairs
    small = slice_to_rank(state, pairs, 1)
    large = small | {pair.a: pad_to(small[pair.a], (4, state[pair.a].shape[1])) for pair in pairs}
    large |= {pair.b: pad_to(small[pair.b], (len(state[pair.b]), 4)) for pair in pairs}
    head = "base_model.model.head.modules_to_save.default.weight"
    for pair in pairs:
        assert (pair.rank(state), pair.rank(small), pair.rank(large)) == (2, 1, 4)
        by_hand = 0.5 * torch.outer(state[pair.b][:, 0], state[pair.a][0]).double()
        torch.testing.assert_close(pair.product(small, scaling=0.5), by_hand, rtol=1e-6, atol=1e-7)
        assert torch.equal(pair.product(large), pair.product(small))
        assert large[pair.a][1:].count_nonzero() == large[pair.b][:, 1:].count_nonzero() == 0
        assert small[pair.b].is_contiguous()
    assert small[head] is large[head] is state[head]
    back = slice_to_rank(large, pairs, 1)
    assert all(torch.equal(back[name], small[name]) for name in state)


def test_a_smaller_rank_stays_and_what_cannot_be_is_refused():
    state = trained()
    pairs = find_pairs(state).pairs
    assert all(torch.equal(value, state[name]) for name, value in slice_to_rank(state, pairs, 9).items())
    with pytest.raises(ValueError, match="rank=0 of a LoRA adapter must be at least 1"):
        slice_to_rank(state, pairs, 0)
    assert tuple(pad_to(state[pairs[0].a].to("meta"), (3, 5)).shape) == (3, 5)
