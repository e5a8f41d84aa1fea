"""benchmarks/candidates.py: rows that clients wrote are marked by the world, and counted."""

import json
from pathlib import Path

import pytest

from fedlight.toy.instructions import answer, instructions


def stage(folder: Path, rounds: list[list[tuple[str, str, str]]], tried: int = 8) -> Path:
    """Records of a stage of seed 3: a client, a question and an answer for each row."""
    records = folder / "seed3" / "fewfedpit_50" / "synthetic"
    records.mkdir(parents=True)
    for number, rows in enumerate(rounds):
        header = {"clients": ["c0", "c1"], "counts": {"tried": tried}}
        lines = [header, *({"client": c, "fields": {"instruction": q, "response": r}} for c, q, r in rows)]
        (records / f"round_{number:04d}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def counted(measured, folder: Path, *flags: str) -> dict:
    (row,) = measured(str(folder), "--keep", "1", *flags)
    return row


def test_rows_are_marked_by_the_worlds_own_answers(measured, tmp_path, capsys):
    asked = next(iter(instructions(split="test", seed=3, domain="kitchen", topic_rows=4)))
    right = ("c0", f"{asked['instruction']} {asked['input']}", asked["output"])
    rounds = [[right, ("c0", "which ? anna bread", "nothing 99")]]
    rounds += [[("c1", "which ? anna towers", "wrong 3")]] * 4
    row = counted(measured, stage(tmp_path, rounds))
    assert row == {"stage": "fewfedpit_50", "seed": 3, "tried": 40, "survived": 6 / 40, "first": 6 / 5, "last": 6 / 5,
                   "short": 9, "visits": 10, "right": 1 / 6, "asked": 1}  # fmt: skip
    assert "survived 0.15" in capsys.readouterr().out


def test_topics_that_share_a_rule_are_counted_apart(measured, tmp_path):
    def right(client, name):
        return client, f"which ? {name} bread", answer(3, "kitchen", ("bread", name), 1)

    rounds: list[list[tuple[str, str, str]]] = [[] for _ in range(6)]
    rounds[0] = [("c0", "which ? ben bread", "nothing 99"), right("c0", "anna")]
    rounds[5] = [right("c0", "ben"), right("c1", "gina")]
    row = counted(measured, stage(tmp_path, rounds), "--rule")
    assert (row["shared right"], row["held right"], row["fact right"], row["held"]) == (0.5, 1.0, 1.0, 0.25)
    assert (row["shared right, first third"], row["shared right, last third"]) == (0.0, 1.0)


def test_a_folder_without_runs_or_records_says_so(benchmark, tmp_path):
    with pytest.raises(SystemExit):
        benchmark.main([str(tmp_path)])
    (tmp_path / "seed0" / "fewfedpit_50").mkdir(parents=True)
    with pytest.raises(SystemExit, match="has no records of rounds"):
        benchmark.main([str(tmp_path)])
