"""benchmarks/peers.py and its ways at a tiny size."""

from pathlib import Path

import pytest
import torch
from turns import Counting

ROOT = Path(__file__).resolve().parents[2]
LOCAL = ("by hand", "by hand, full", "lightning", "own", "own, full", "sft", "own, stacked", "sft, stacked")


@pytest.fixture(scope="module")
def peers():
    import peers

    return peers


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    from peers_ways import Settings, save_model

    folder = str(tmp_path_factory.mktemp("peers"))
    made = Settings(folder, [[2, 8]], rounds=1, clients=3, steps=2, hidden=16, layers=1, at_once=3)
    assert save_model(made) == 512 * 16 * 2 + 4 * 16 * 16 + 3 * 16 * 48 + 3 * 16
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOCAL)
def test_every_way_trains_all_rounds(settings, name, monkeypatch):
    import peers_ways

    seen = []
    step = lambda self, closure=None: seen.append(closure and closure())  # noqa: E731
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    turns = Counting()
    peers_ways.ways(settings)[name]([2, 8], turns)
    assert turns.rounds == settings.rounds + 1
    groups = 1 if name.endswith("stacked") else settings.clients
    assert len(seen) == 2 * settings.steps * groups


class Scripted:
    """Processes of a way that answer with given seconds, and end when there are none left."""

    def __init__(self, peers, name, seconds, order):
        self.peers, self.name, self.seconds, self.order = peers, name, list(seconds), order

    def wait(self):
        return self.train_round()

    def train_round(self):
        self.order.append(self.name)
        if not self.seconds:
            raise self.peers.Ended("no memory")
        return self.seconds.pop(0)

    def end(self):
        self.order.append(f"{self.name} ends")


def test_ways_take_turns_and_one_that_fails_is_left_out(peers, settings, monkeypatch, tmp_path, capsys):
    order, seconds = [], {"by hand": [0.0, 9.0, 1.0, 9.0, 2.0], "own": [0.0, 9.0, 3.0, 9.0]}
    monkeypatch.setattr(peers, "Way", lambda name, *rest: Scripted(peers, name, seconds[name], order))
    peers.Way.wait, peers.Way.train_round = Scripted.wait, Scripted.train_round
    two = peers.Settings(**{**vars(settings), "sizes": [[2, 8], [4, 8]]})
    found = peers.measure(["by hand", "own"], two, {}, 1, tmp_path)
    assert found == {("by hand", "2x8"): [1.0], ("by hand", "4x8"): [2.0], ("own", "2x8"): [3.0]}
    one_round = ["by hand", "own", "own", "by hand"]  # the second turn starts with the other
    assert order == ["by hand", "own", *one_round, *one_round[:3], "own ends", "by hand", "by hand ends"]
    assert "own is left out: no memory" in capsys.readouterr().out


def test_rows(peers):
    found = {("by hand", "2x16"): [1.0, 2.0, 4.0], ("own", "2x16"): [2.0, 2.0, 5.0]}
    found["own, stacked", "2x16"] = [1.0] * 3
    rows = {row["way"]: row for row in peers.compare(found, clients=10)}
    names = [f"{name}_2x16" for name in ("visits", "ratio", "low", "high")]
    for way, values in (("by hand", (5.0, 1.0, 1.0, 1.0)), ("own", (5.0, 0.8, 0.5, 1.0))):
        assert rows[way] == {"way": way, **dict(zip(names, values, strict=True))}
    assert rows["own, stacked"]["ratio_2x16"] == 2.0
    assert set(rows) == {"by hand", "own", "own, stacked"}  # no comparison with pfl, which was not measured


@pytest.mark.slow  # whole runs
def test_a_given_model_is_trained_in_the_place_of_a_random_one(settings, peers, tmp_path):
    from dataclasses import replace

    other = replace(settings, folder=str(tmp_path / "model"), hidden=8)
    given = peers.make_model(other, Path(settings.folder), 1, tmp_path)
    assert given == peers.make_model(settings, None, 1, tmp_path)
    assert (tmp_path / "model").is_symlink()
