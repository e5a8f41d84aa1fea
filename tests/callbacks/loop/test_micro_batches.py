from collections import namedtuple

import pytest
import torch

from fedlight.callbacks.loop.fitted_step import count_examples, join_results, reduce_parts, take_examples

Pair = namedtuple("Pair", "x y")


def test_batches_are_cut_in_any_nesting():
    from transformers import BatchEncoding

    inner = {"x": torch.arange(6).view(3, 2), "texts": ["a", "b", "c"]}
    batch = BatchEncoding(
        {"inner": [inner, (torch.arange(3), 7)], "pair": Pair(torch.arange(3), ("a", "b")), "none": None}
    )
    part = take_examples(batch, 1, 3)
    assert type(part) is BatchEncoding
    assert part.inner[0]["x"].tolist() == [[2, 3], [4, 5]]
    assert part.inner[0]["texts"] == ["b", "c"]
    assert part.inner[1][0].tolist() == [1, 2]
    assert part.inner[1][1] == 7
    assert part["pair"].x.tolist() == [1, 2]
    assert part["pair"].y == ("a", "b")  # not one per example
    assert part["none"] is None
    assert take_examples((torch.arange(2), Pair("a", "b")), 0, 1)[1] == Pair(
        "a", "b"
    )  # fields are no examples
    assert inner["texts"] == ["a", "b", "c"]
    assert batch.inner[0]["x"].shape == (3, 2)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("mean", 2.25), (torch.mean, 2.25), ("sum", 7), (sum, 7), ("min", 2), (torch.max, 5), (torch.prod, 10)],
)
def test_parts_of_what_is_logged(how, expected):
    """2 over eleven examples and 5 over one: their mean is 27 / 12."""
    assert float(reduce_parts([2, torch.tensor(5.0)], [11, 1], how)) == expected


def test_what_cannot_be_cut():
    with pytest.raises(ValueError, match=r"type dict cannot be cut .* have 2 and 3 rows: give each"):
        count_examples({"x": torch.zeros(2), "y": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"type str cannot be cut .* have no rows"):
        count_examples("text")


def test_results_are_joined():
    """Single numbers count by their share of the examples; rows follow each other; of the rest the last is kept."""
    parts = [{"loss": torch.tensor(1.0), "rows": torch.tensor([1, 2]), "note": "a"}]
    parts += [{"loss": torch.tensor(4.0), "rows": torch.tensor([3]), "note": "b"}]
    whole = join_results(parts, [2 / 3, 1 / 3])
    assert whole["loss"].item() == pytest.approx(2.0)
    assert whole["rows"].tolist() == [1, 2, 3]
    assert whole["note"] == "b"
    assert join_results([torch.tensor(1.0), torch.tensor(2.0)], [0.25, 0.75]).item() == 1.75
