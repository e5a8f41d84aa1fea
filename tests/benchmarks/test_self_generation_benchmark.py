"""benchmarks/self_generation.py at a tiny size: what it counts, and that both ways of asking are one."""

import pytest

TINY = "--rounds 2 --clients 2 --number 4 --client-rows 8 --new-tokens 4 --batch-size 3 --repeats 1"


def test_shares_and_speeds(measured, capsys):
    found = measured(*TINY.split())
    rounds, rows = found["rounds"], {row["what"]: row for row in found["rows"]}
    counts = rounds["counts"]  # of the last round
    assert counts["tried"] >= counts["survived"] + counts["candidates_missing"] == 2 * 4
    assert all(seconds > 0 for seconds in rounds["seconds"].values())
    assert sum(rounds["shares"].values()) == pytest.approx(1)
    assert rounds["not_model"] == pytest.approx(rounds["shares"]["filters"] + rounds["shares"]["rest"])
    # At least one question for the instruction and one for the response of each of 2 rounds x 2 clients x 4.
    assert rows["writing"]["texts"] >= 2 * 2 * 2 * 4 - 4
    assert rows["writing"]["tokens"] <= 4 * rows["writing"]["texts"]
    assert rows["writing"]["same"] > 0.9
    assert rows["scoring"]["error"] < 1e-4
    assert rows["scoring"]["texts"] % 2 == 0  # IFS: behind the prompt, and by itself
    out = capsys.readouterr().out
    assert "one by one" in out
    assert "not the model's" in out


def test_a_loop_asks_with_one_prompt_each_and_what_belongs_to_it(benchmark):
    asked = []

    def ask(prompts, *more, **named):
        asked.append((prompts, *more, named))
        return [prompt.upper() for prompt in prompts]

    call = (["a", "b"], ([["x"], ["y"]],), {"raw": True})
    assert benchmark.one_by_one(ask, call) == benchmark.together(ask, call) == ["A", "B"]
    alone = [(["a"], [["x"]]), (["b"], [["y"]])]
    assert asked == [(*words, {"raw": True}) for words in (*alone, (["a", "b"], [["x"], ["y"]]))]
