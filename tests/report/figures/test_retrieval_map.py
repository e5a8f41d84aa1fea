import numpy as np
from added_rows import added_rows
from tiny_world import write_rows

from fedlight.report.figures import retrieval_map

WORDS = {"math": "sum of odd numbers", "poems": "rhyme about rivers", "code": "sort this list"}


def text(kind, number):
    return f"{WORDS[kind]} {WORDS[kind]} {number}"


def record(folder, chosen):
    return added_rows(folder, [(f"c{i % 2}", one, 0.5) for i, one in enumerate(chosen)])


def test_a_row_counts_as_inside_by_its_text(tmp_path):
    rows = [{"question": text(kind, i), "answer": "x"} for kind in ("math", "poems") for i in range(30)]
    domain = write_rows(tmp_path / "domain.jsonl", rows)
    records = {
        "random": record(tmp_path / "random", [text("code", i) for i in range(8)] + [text("math", 1)] * 2),
        "FedDCA": record(tmp_path / "feddca", [text("math", i) for i in range(12)]),
    }
    columns = {"instruction": "question", "response": "answer"}
    drawn = [
        retrieval_map.retrieval_map(records, domain, columns, str(tmp_path / file))
        for file in ("a.svg", "b.svg")
    ]
    counts = [tuple(row[name] for name in ("method", "retrieved", "inside")) for row in drawn[0]["rows"]]
    assert counts == [("random", 9, 1), ("FedDCA", 12, 12)]
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    for title in ("1 of 9 in the domain", "12 of 12 in the domain"):
        assert f"<!-- {title} -->" in (tmp_path / "a.svg").read_text()


def test_what_is_near_stays_near():
    rng = np.random.default_rng(0)
    centers = np.eye(3, 10)
    around = [center + 0.05 * rng.normal(size=(20, 10)) for center in centers]
    vectors = np.concatenate(around).astype(np.float32)
    flat = retrieval_map.flatten(vectors, seed=0)
    groups = flat.reshape(3, 20, 2)
    within = max(np.linalg.norm(group - group.mean(axis=0), axis=1).mean() for group in groups)
    means = groups.mean(axis=1)
    between = min(np.linalg.norm(means[i] - means[j]) for i in range(3) for j in range(i))
    assert between > 2 * within
    assert np.array_equal(flat, retrieval_map.flatten(vectors, seed=0))


def test_each_panel_has_its_points_over_the_ground():
    groups = {"inside": np.array([[1.0, 1.0], [2.0, 2.0]]), "others": np.array([[3.0, 3.0]])}
    figure = retrieval_map.draw_groups_of_points(np.zeros((5, 2)), dict.fromkeys("abcd", groups), "domain")
    shown = [axes for axes in figure.axes if axes.collections]
    assert [axes.get_title() for axes in shown] == [*"abcd"]
    assert [len(points.get_offsets()) for points in shown[0].collections] == [5, 2, 1]
