"""benchmarks/fleet_topics.py on a made-up run: who holds a topic, and how well it was answered."""

import json

from tiny_world import write_lines


def written(file, rows):
    write_lines(file, *map(json.dumps, rows))


def test_accuracy_by_who_holds_a_topic(benchmark, measured, tmp_path):
    seed = tmp_path / "seed0"
    private = [("a", "eva hats"), ("b", "eva hats"), ("a", "kim figs"), ("b", "kim pies . ben jam")]
    rows = [{"client": client, "fields": {"input": text}} for client, text in private]
    written(seed / "dropouts" / "augmentation" / "private.jsonl", rows)
    (seed / "dropouts" / "visits.csv").write_text("client,reason\na,\nb,out_of_memory\n")
    for folder in benchmark.RUNS.values():
        for epoch in (4, 8, 12, 16, 20):  # the first is too early to count
            right = float(epoch > 4 and folder == "forward")
            asked = [("eva hats", right), ("kim figs", 1.0), ("ben jam", 0.0), ("lea oil", 0.0)]
            rows = [{"fields": {"input": text}, "score": score} for text, score in asked]
            written(seed / folder / "tasks" / f"epoch_{epoch}" / "domain.jsonl", rows)
    rows = measured(str(tmp_path))["rows"]
    found = {(row["method"], row["holders"]): (row["score"], row["questions"]) for row in rows}
    assert found["forward", "both"] == (1, 1)
    assert found["dropouts", "both"] == (0, 1)
    assert found["buffered", "capable phones"] == (1, 1)
    assert found["forward", "small phones"] == found["forward", "nobody"] == (0, 1)
