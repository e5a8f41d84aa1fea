import pytest
from stacked import Lora, Points, fit

SIZES = {"a": 8, "b": 7, "c": 3, "d": 5}


class Seen(Points):
    """Notes the examples of each batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches = []

    def collate(self, examples):
        self.batches.append([int(example) for example in examples])
        return super().collate(examples)


@pytest.mark.parametrize(
    ("local_steps", "steps", "left"),
    [(1, (1, 1, 1, 1), {"a": 4, "b": 3, "c": 0, "d": 1}), (None, (2, 2, 1, 2), dict.fromkeys(SIZES, 0))],
)
def test_the_rows_that_a_visit_leaves_unseen_follow_from_its_examples_and_steps(local_steps, steps, left):
    """No example is seen twice; with None, which is one pass, each is seen."""
    data = Seen(SIZES)
    _, rows, *_ = fit(Lora(), data, rounds=1, local_steps=local_steps)
    assert {row["client"]: row["steps"] for row in rows} == dict(zip("abcd", steps, strict=True))
    assert {row["client"]: max(0, row["examples"] - 4 * row["steps"]) for row in rows} == left
    seen = sum(data.batches, [])
    assert len(set(seen)) == len(seen) == sum(SIZES.values()) - sum(left.values())


@pytest.mark.parametrize(("accumulation", "told"), [(1, False), (2, True)])
def test_a_pass_that_is_cut_to_whole_steps_says_so(caplog, accumulation, told):
    """Client b has one step of two batches, and a pass that is shorter than a step would be repeated and not cut."""
    data, settings = Seen({"a": 12, "b": 8}), {"accumulate_grad_batches": accumulation}
    with caplog.at_level("INFO"):
        fit(Lora(), data, rounds=1, local_steps=None, clients_per_round=2, settings=settings)
    assert ("the passes of 1 client are cut to whole optimizer steps" in caplog.text) == told
    assert len(data.batches) == (4 if told else 5)
