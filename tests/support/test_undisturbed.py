from collections import OrderedDict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MetricCollection, SumMetric

from fedlight.support.torch_parts import replaced, tensors, undisturbed, with_parts


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.total, self.seen = nn.BatchNorm1d(2), SumMetric(), CatMetric()
        self.several = MetricCollection({"a": SumMetric(), "b": SumMetric()})
        self.register_buffer("queue", torch.zeros(3))
        self.same_queue = self.queue
        self.table = OrderedDict(sizes=[1], nested={"x": torch.ones(2)})
        self.count, self.outputs, self.members = 0, [], {"a"}

    def step(self):
        loss = self.norm(torch.randn(4, 2)).square().mean()
        self.total.update(2.0)
        self.seen.update(torch.tensor([3.0]))
        self.several.update(4.0)
        self.total.compute()
        self.queue += 1
        assert self.same_queue is self.queue
        self.count += 1
        self.outputs.append(loss)
        self.members.add("b")
        self.table["sizes"].append(2)
        self.table["nested"]["x"].mul_(5)
        self.new = loss
        self.eval()
        loss.backward()


@pytest.mark.parametrize("inference", [False, True])
def test_all_is_as_before(inference):
    module = Keeps()
    with torch.inference_mode(inference):  # as in the validation before training
        module.total.update(1.0)
        module.seen.update(torch.tensor([1.0]))
        module.several.update(1.0)
    module.norm.weight.grad = grad = torch.ones(2)
    before, state = dict(vars(module)), {name: x.clone() for name, x in module.state_dict().items()}
    with undisturbed(module):
        assert module.norm.weight.grad is None
        module.step()
        assert module.total.compute() == 3
        assert module.seen.compute().tolist() == [1, 3]
        assert module.norm.weight.grad is not grad
    assert vars(module).keys() == before.keys()
    assert all(vars(module)[name] is value for name, value in before.items())
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert module.norm.weight.grad is grad
    assert grad.eq(1).all()
    assert module.norm.bias.grad is None
    assert module.norm.training
    assert (module.count, module.outputs, module.members) == (0, [], {"a"})
    assert module.table["sizes"] == [1]
    assert module.table["nested"]["x"].eq(1).all()
    assert module.total.update_count == 1
    assert module.total.compute() == 1
    assert module.seen.compute() == 1
    assert {name: float(value) for name, value in module.several.compute().items()} == {"a": 1, "b": 1}


def test_an_error_leaves_no_trace():
    module = Keeps()
    with pytest.raises(KeyError), undisturbed(module):
        module.step()
        raise KeyError
    assert module.count == 0
    assert module.queue.eq(0).all()
    assert module.norm.num_batches_tracked == 0


class Owner:
    def step(self):
        return "class"


def test_what_was_there_comes_back():
    owner = Owner()
    with replaced(owner, "step", lambda: "other"):
        assert owner.step() == "other"
    assert vars(owner) == {}
    assert owner.step() == "class"
    owner.step = own = lambda: "own"
    with pytest.raises(KeyError), replaced(owner, "step", None), replaced(owner, "step", 1):
        raise KeyError
    assert owner.step is own


Pair = namedtuple("Pair", "x y")


def negated(value):
    return -value if isinstance(value, torch.Tensor) else with_parts(value, negated)


def test_all_tensors_are_found_and_types_are_kept():
    from transformers import BatchEncoding

    one, two, three, four, five = torch.arange(1, 6).unbind()
    batch = BatchEncoding(
        {
            "pair": Pair(one, [two, "text"]),
            "ordered": OrderedDict(x=(three, None)),
            "fixed": MappingProxyType({"x": four}),
            "last": five,
        }
    )
    assert [x.item() for x in tensors(batch)] == [1, 2, 3, 4, 5]
    changed = negated(batch)
    assert [x.item() for x in tensors(changed)] == [-1, -2, -3, -4, -5]
    assert [x.item() for x in tensors(batch)] == [1, 2, 3, 4, 5]
    assert type(changed) is BatchEncoding
    assert type(changed["pair"]) is Pair
    assert changed["pair"].y[1] == "text"
    assert type(changed["ordered"]) is OrderedDict
    assert changed["ordered"]["x"][1] is None
