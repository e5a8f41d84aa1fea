import math
import re

import lightning as L
import pytest
from answered import run_folder
from lightning.pytorch.loggers.logger import DummyLogger
from tiny_world import EVAL_PROMPTS

from fedlight import DPOModule, Judge, PromptDataModule, WinRate
from fedlight.evaluation.bootstrap import bootstrap_interval
from fedlight.evaluation.equal_length import Compared, rates_at_equal_length
from fedlight.judges.duels import duels

LONGER = {"class_path": "LengthJudge"}
LENGTHS = [3, 9, 9, 4, 9, 9, 9, 2, 9, 9, 9, 6]


def at_equal_length(wins, gaps):
    return rates_at_equal_length({"m": Compared(wins, gaps, range(12))})["m"].corrected


def test_duels_have_an_interval_and_a_rate_at_equal_length(tmp_path):
    methods = {"long": run_folder(tmp_path / "a", LENGTHS), "short": run_folder(tmp_path / "b", [3, 7] * 6)}
    done = duels(methods, LONGER, "names", str(tmp_path / "wins"))
    outcomes = [0.5 if length == 6 else float(length > 6) for length in LENGTHS]
    judged = {
        "long": Compared(outcomes, [length - 6 for length in LENGTHS], range(12)),
        "short": Compared([0.0, 1.0] * 6, [-3, 1] * 6, range(12)),
    }
    expected = rates_at_equal_length(judged)
    for row in done["rows"]:
        wins = judged[row["method"]].wins
        assert row["win_rate"] == pytest.approx(sum(wins) / 12)
        assert row["win_rate"] == pytest.approx(row["win"] + row["tie"] / 2)
        assert (row["win_rate_low"], row["win_rate_high"]) == bootstrap_interval(wins)
        assert row["at_equal_length"] == pytest.approx(expected[row["method"]].corrected)
    (row, _) = done["rows"]
    assert row["at_equal_length"] < row["win_rate"] - 0.1  # this judge goes by length, and ours are longer
    ends = f"[{row['win_rate_low']:.3f}, {row['win_rate_high']:.3f}]"
    shown = re.sub(r" +", " ", done["report"])
    assert f"{row['win_rate']:.3f} {ends} │ {row['at_equal_length']:.3f} │" in shown
    assert "at equal length" in done["report"]


def test_few_prompts_have_no_rate_at_equal_length(tmp_path):
    run = run_folder(tmp_path / "a", LENGTHS[:1])
    done = duels({"long": run}, LONGER, "names", str(tmp_path / "wins"))
    assert not {"at_equal_length", "win_rate_low", "wt_stderr"} & set(done["rows"][0])
    assert "at equal length" not in done["report"]


class Longer(Judge):
    """The longer answer, but a tie for the one shown second where it is longer by ``least`` at most."""

    def __init__(self, least=0):
        self.least = least

    def verdicts(self, fields, ours, theirs):
        gaps = [len(a) - len(b) for a, b in zip(ours, theirs, strict=True)]
        return [1.0 if gap > 0 else 0.5 if gap >= -self.least else 0.0 for gap in gaps]


@pytest.mark.parametrize(("in_both", "least"), [(False, 1), (True, 3)])
def test_the_rate_at_equal_length_counts_as_the_others_do(in_both, least, tmp_path, monkeypatch):
    monkeypatch.setattr("fedlight.judges.duels.made_judge", lambda spec: Longer(least=2))
    lengths = [3, 9, 8, 4, 9, 7, 9, 2, 7, 9, 8, 6]
    runs = {"m": run_folder(tmp_path / "run", lengths)}
    (row,) = duels(runs, {}, "names", str(tmp_path / "wins"), in_both=in_both)["rows"]
    gaps = [length - 6 for length in lengths]
    wins = [1.0 if gap >= least else 0.0 if gap <= -least else 0.5 for gap in gaps]
    assert row["win_rate"] == pytest.approx(sum(wins) / 12)
    assert (row["win_rate_low"], row["win_rate_high"]) == bootstrap_interval(wins)
    assert row["at_equal_length"] == pytest.approx(at_equal_length(wins, gaps))


@pytest.mark.parametrize("limit", [12, 1])
def test_the_win_rate_while_training_has_them_too(limit, tiny_model):
    class Writes(DPOModule):
        """Twelve answers: as raw ones have four characters each, as tuned ones two to eight."""

        def generate(self, prompts, raw=False, **options):
            return [["x" * (4 if raw else 2 + index % 7)] for index, _ in enumerate(prompts)]

    settings = {"tokenizer": tiny_model, "max_tokens": 128, "eval_batch_size": 12, "limit": limit}
    prompts = PromptDataModule(EVAL_PROMPTS, **settings)
    callback, module = WinRate(prompts, {"longer": Longer()}), Writes(tiny_model)
    trainer = L.Trainer(logger=DummyLogger(), accelerator="cpu", enable_progress_bar=False, max_epochs=1)
    callback.setup(trainer, module, "fit")
    callback.on_train_start(trainer, module)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    gaps = [index % 7 - 2 for index in range(limit)]
    scores = [0.5 if gap == 0 else float(gap > 0) for gap in gaps]
    assert found["win_rate/longer"] == pytest.approx(sum(scores) / limit)
    if limit == 1:
        assert set(found) == {"win_rate/longer", "win_rate_unread/longer", "win_rate/words"}
        return
    ends = [found["win_rate_low/longer"], found["win_rate_high/longer"]]
    assert ends == pytest.approx(bootstrap_interval(scores))
    corrected = at_equal_length(scores, gaps)
    assert found["win_rate_equal_length/longer"] == pytest.approx(corrected)
    assert not math.isnan(corrected)
