import pytest
import torch
from torch import nn

from fedlight.callbacks.loop.parts.buffers import changed, put_back, snapshot

NAN = float("nan")
VALUES = {
    "fp32": torch.tensor([1.0, NAN, float("-inf")]),
    "fp64": torch.tensor(0.5, dtype=torch.float64),
    "bf16": torch.ones(3, 5, dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j, NAN + 0j]),
    "whole": torch.arange(7, dtype=torch.int8),
    "truth": torch.ones(3, 3, dtype=torch.bool).tril(),
    "empty": torch.zeros(0, 4),
    "slice": torch.arange(9, dtype=torch.int16)[1:],
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "expanded": torch.arange(3.0).expand(4, 3),
    "sparse": torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse(),
}


@pytest.fixture(autouse=True)
def quiet():
    with torch.sparse.check_sparse_tensor_invariants():
        yield


class Holds(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.part = nn.Module()
        self.part.register_buffer("value", value)
        self.part.register_buffer("nothing", None)


@pytest.mark.parametrize("kind", VALUES)
def test_what_is_equal_has_not_changed_and_what_differs_in_one_value_has(kind):
    value = VALUES[kind]
    module = Holds(value.clone())
    before = snapshot(module)
    assert changed(module, before) == []
    module.part.value = value.clone()  # another tensor with the same content
    assert changed(module, before) == []
    if value.numel():
        other = value.to_dense().contiguous().clone(memory_format=torch.contiguous_format)
        other.view(-1)[-1] = ~other.view(-1)[-1] if kind == "truth" else 9
        module.part.value = other.to_sparse() if kind == "sparse" else other
        assert changed(module, before) == ["part.value"]
        put_back(module, before)
        assert changed(module, before) == []


@pytest.mark.parametrize("new", [torch.zeros(4), torch.zeros(3, dtype=torch.float64), None])
def test_another_size_or_type_is_a_change_and_is_put_back(new):
    module = Holds(torch.zeros(3))
    before = snapshot(module)
    module.part.value = new
    module.part.nothing = torch.ones(1)
    module.register_buffer("late", torch.ones(1))
    assert sorted(changed(module, before)) == ["late", "part.nothing", "part.value"]
    put_back(module, before)
    assert changed(module, before) == []
    assert torch.equal(module.part.value, torch.zeros(3))
    assert module.part.nothing is None
    assert not hasattr(module, "late")


def test_in_place_where_that_can_be_so_that_others_who_hold_the_tensor_see_it():
    module = Holds(torch.zeros(3))
    held, before = module.part.value, snapshot(module)
    held.add_(1)
    put_back(module, before)
    assert module.part.value is held
    assert held.sum() == 0
    assert before["part.value"] is not held


def test_a_tensor_of_inference_mode_is_replaced():
    module = Holds(torch.zeros(3))
    before = snapshot(module)
    with torch.inference_mode():
        module.part.value = torch.ones(3)
    put_back(module, before)
    module.part.value.add_(1)
    assert module.part.value.tolist() == [1.0, 1.0, 1.0]
