import json

import pytest
from tiny_world import write_rows

from fedlight.cli.main import main
from fedlight.first_config.columns import GuessError
from fedlight.first_config.draft import Wishes, make_draft
from fedlight.first_config.opinions import make_opinions

OURS = ("participant", "group", "statement_id", "vote", "statement", "moderated")
THEIRS = ("who", "cluster", "nr", "opinion", "words", "status")


def write_files(folder, names):
    """Forty people agree on which of twelve statements are right."""
    person, group, item, vote, text, moderated = names
    votes = [
        {person: f"p{p}", group: str(p % 2), item: str(s), vote: "agree" if s % 2 else "disagree"}
        for p in range(40)
        for s in range(12)
    ]  # fmt: skip
    statements = [{item: str(s), text: f"we want {s}", moderated: "01"[s % 3 > 0]} for s in range(12)]
    for name, rows in (("votes", votes), ("statements", statements)):
        write_rows(folder / f"{name}.jsonl", rows)


@pytest.mark.parametrize("names", [OURS, THEIRS], ids=["usual names", "other names"])
def test_columns_of_both_files_are_found(names, tmp_path):
    write_files(tmp_path, names)
    draft = make_opinions(str(tmp_path / "votes.jsonl"), str(tmp_path / "statements.jsonl"), {})
    assert draft.columns == {
        **{"participant": names[0], "group": names[1], "statement_id": names[2], "vote": names[3]},
        **{"statement": names[4], "moderated": names[5]},
    }
    assert draft.rows == 480


def test_the_recipe_runs_to_its_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, THEIRS)
    main(["init", "votes.jsonl", "--statements", "statements.jsonl", "--output", "own.yaml"])
    main(["run", "own.yaml", "--output", "out"])
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    (own,) = [row["own"] for row in rows if row["method"] == "FedBis"]
    assert own > 0.8


def test_votes_on_single_statements_ask_for_the_statements(tmp_path):
    write_files(tmp_path, THEIRS)
    with pytest.raises(GuessError, match=r"column opinion says agree and disagree.*--statements FILE"):
        make_draft(Wishes(str(tmp_path / "votes.jsonl"), model="toy"))
