import pytest
from tiny_world import write_rows

from fedlight.evaluation.bootstrap import bootstrap_interval
from fedlight.evaluation.equal_length import Compared, rates_at_equal_length
from fedlight.evaluation.judge import Judge
from fedlight.judges.duels import duels

LENGTHS = [3, 9, 8, 4, 9, 7, 9, 2, 7, 9, 8, 6]


class Hesitant(Judge):
    """The longer answer, but a tie for the one shown second where it is longer by two at most."""

    def verdicts(self, fields, ours, theirs):
        gaps = [len(a) - len(b) for a, b in zip(ours, theirs, strict=True)]
        return [1.0 if gap > 0 else 0.5 if gap >= -2 else 0.0 for gap in gaps]


def test_the_rate_at_equal_length_counts_as_the_others_do(tmp_path, monkeypatch):
    monkeypatch.setattr("fedlight.judges.duels.made_judge", lambda spec: Hesitant())
    (tmp_path / "run/tasks/test").mkdir(parents=True)
    rows = [
        {"row": index, "prompt": f"Name {index}.", "target": "x" * 6, "answers": ["x" * length], "fields": {}}
        for index, length in enumerate(LENGTHS)
    ]
    write_rows(tmp_path / "run/tasks/test/names.jsonl", rows)
    settings = ({"m": str(tmp_path / "run")}, {}, "names", str(tmp_path / "wins"))
    for in_both, least in ((False, 1), (True, 3)):
        gaps = [length - 6 for length in LENGTHS]
        wins = [1.0 if gap >= least else 0.0 if gap <= -least else 0.5 for gap in gaps]
        (row,) = duels(*settings, in_both=in_both)["rows"]
        assert row["win_rate"] == pytest.approx(sum(wins) / 12)
        assert (row["win_rate_low"], row["win_rate_high"]) == bootstrap_interval(wins)
        corrected = rates_at_equal_length({"m": Compared(wins, gaps, range(12))})["m"].corrected
        assert row["at_equal_length"] == pytest.approx(corrected)
