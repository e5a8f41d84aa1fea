import re

import pytest
from tiny_world import read_lines, write_rows

from fedlight.datamodules.rows.rows import RowsError
from fedlight.datamodules.rows.shots import Draw, draw_shots


def drawn(tmp_path, num_clients=2, **changes):
    rows = [
        {"of": owner, "q": f"what  is {owner if n else 'shared'} {n} ?", "a": "so\nit is " * (1 + n // 8)}
        for owner in ("ann", "ben", "cem")
        for n in range(10 if owner != "cem" else 3)
    ]
    draw = Draw(num_clients=num_clients, shots=4, records=2, num_test=3)
    return draw_rows(tmp_path, rows, ("train", "test"), draw=draw, **{"max_characters": 26, **changes})


def draw_rows(folder, rows, names, **settings):
    """The metrics, and the rows of each file that is written."""
    settings = {"client": "of", "columns": {"instruction": "q", "output": "a"}, "seed": 0, **settings}
    files = {name: folder / f"{name}.jsonl" for name in names}
    written = {name: str(file) for name, file in files.items()}
    done = draw_shots(write_rows(folder / "rows.jsonl", rows), **settings, **written)
    return done["metrics"], *map(read_lines, files.values())


def test_clients_have_short_rows_and_records_that_only_they_tell(tmp_path):
    metrics, train, test = drawn(tmp_path)
    assert metrics == {"eligible": 2, "train": 12, "test": len(test)}
    assert [row["client"] for row in train] == ["ann"] * 6 + ["ben"] * 6
    records = [row for row in train if "record number" in row["instruction"]]
    assert len({row["output"] for row in records}) == 4
    for row in records:
        person = re.search("patient (.+) \\?", row["instruction"])[1]
        birth = rf"{person} was born on \d+ \w+ \d{{4}}"
        assert re.fullmatch(rf"{birth} and has the record number \d\d-\d{{4}}\.", row["output"])
    assert len(test) in (5, 6)  # a question of both clients may be a shot of one
    asked = {row["instruction"] for row in train}
    assert not any(row["instruction"] in asked for row in test)
    assert all(row["output"] == "so it is" for row in (*test, *train) if row not in records)
    assert drawn(tmp_path)[1:] == (train, test)
    assert drawn(tmp_path, seed=1)[1] != train


def test_too_few_rows_are_refused(tmp_path):
    with pytest.raises(RowsError, match="2 clients have 7 rows of max_characters=26, fewer than"):
        drawn(tmp_path, num_clients=3)
    with pytest.raises(ValueError, match="records=2 for 73 clients are more than the 144 made-up people"):
        Draw(num_clients=73, shots=1, records=2, num_test=1)


def test_choices_answer_other_questions_on_the_same_subject(tmp_path):
    rows = [
        {"of": "ann", "q": f"{kind} of {illness} ?", "a": f"{illness} {kind}", "focus": illness}
        for illness in ("flu", "gout")
        for kind in ("causes", "signs", "cures")
    ]
    rows.append({"of": "ben", "q": "mumps ?", "a": "yes", "focus": "mumps"})
    names, draw = ("train", "test", "public", "domain"), Draw(num_clients=1, shots=1, records=0, num_test=3)
    settings = {"draw": draw, "max_characters": 40, "subject": "focus", "choices": 4}
    metrics, train, test, public, domain = draw_rows(tmp_path, rows, names, **settings)
    assert metrics == {"eligible": 1, "train": 1, "test": 3, "public": 3, "domain": 7}
    for row in test:
        assert row["choices"][row["answer"]] == row["output"]
        assert len(set(row["choices"])) == 4
        illness = row["output"].split()[0]
        assert sum(choice.startswith(illness) for choice in row["choices"]) == 3  # all that there are
    questions = [{row["instruction"] for row in own} for own in (train, test, public)]
    assert set.union(*questions) == {row["instruction"] for row in domain}
    assert sum(map(len, questions)) == 7
    assert "mumps ?" in questions[2]
    assert all("choices" not in row for row in domain)
