"""benchmarks/selector_cost.py at a tiny size: what it counts, against counts by hand."""

import pytest
import torch

PAIRS, HIDDEN, VOCABULARY, PROMPT, RESPONSE, QUESTION = 3, 16, 300, 12, 4, 2
SHOWN, ALONE = PROMPT + 2 * RESPONSE + QUESTION, PROMPT + RESPONSE


@pytest.fixture(scope="module")
def rows(measured):
    sizes = {"pairs": PAIRS, "hidden": HIDDEN, "vocabulary": VOCABULARY, "question": QUESTION}
    sizes |= {"layers": 1, "rank": 2, "steps": 1}
    options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    return {row["method"]: row for row in measured("--texts", f"{PROMPT}x{RESPONSE}", *options)["rows"]}


def test_texts_of_a_step(rows):
    found = {name: (row["sequences"], row["tokens"]) for name, row in rows.items()}
    assert found == {
        "selector, one order": (3, SHOWN),
        "selector, both orders": (6, SHOWN),
        "naive selector, one order": (3, SHOWN),
        "reward model": (6, ALONE),
        "DPO, first epoch": (6, ALONE),
        "DPO, later epochs": (6, ALONE),
    }
    assert all(row["seconds"] > 0 for row in rows.values())


def test_the_heads_operations(rows):
    """A product with the output head takes 2 x hidden operations per position and token, and as many backwards."""
    product = 2 * HIDDEN

    def flop(name):
        return round(1e9 * rows[name]["gflop"])

    one = flop("selector, one order")
    # Some releases of transformers compute the rotary frequencies once for both.
    assert flop("selector, both orders") == pytest.approx(2 * one, rel=2e-4)
    heads = 2 * product * PAIRS * (SHOWN * VOCABULARY - 2)
    assert flop("naive selector, one order") - one == pytest.approx(heads, rel=2e-4)
    assert rows["selector, both orders"]["ratios"]["gflop"] == pytest.approx(2, rel=2e-4)
    later, first = flop("DPO, later epochs"), flop("DPO, first epoch")
    scored = 2 * PAIRS * RESPONSE
    # The reward's head is trained: three products, of one position, where DPO has two of each scored one.
    assert later - flop("reward model") == 2 * product * scored * VOCABULARY - 3 * product * 2 * PAIRS
    assert first > later + product * scored * VOCABULARY  # the reference's pass, its layers besides


def test_bytes(rows):
    one, both = rows["selector, one order"], rows["selector, both orders"]
    assert both["saved_mib"] / one["saved_mib"] == pytest.approx(2, rel=0.02)
    assert all(row["peak_mib"] > row["saved_mib"] > 0 for row in rows.values())
    logits = 4 * PAIRS * SHOWN * VOCABULARY / 2**20
    assert rows["naive selector, one order"]["peak_mib"] > one["peak_mib"] + logits
    # LoRA of rank 2 on four square layers and three of the feed-forward network; the reward model's head besides.
    wide = HIDDEN * 8 // 3
    assert one["adapter_bytes"] == 4 * 2 * (4 * 2 * HIDDEN + 3 * (HIDDEN + wide))
    assert rows["reward model"]["adapter_bytes"] == one["adapter_bytes"] + 4 * HIDDEN


def test_live_bytes(benchmark):
    """Two of 4,000 bytes at once, and a view; the first is freed before the third."""
    with benchmark.LiveBytes() as live:
        first = torch.zeros(1000)
        second = first + 1
        del first
        third = second.view(10, 100) + 1
    assert live.peak == 8000
    del second, third
    assert live.now == 0
