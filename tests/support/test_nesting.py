from collections import OrderedDict, namedtuple
from types import MappingProxyType

import torch

from fedlight.support.torch_parts import tensors, with_parts

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
