import logging

import pytest
import torch
from plain_lightning import assert_equal
from stacked import Lora, Points, assert_same_rows, fit, furthest
from thread_team import on_team

from fedlight import FedProx, Visit
from fedlight.callbacks.loop.groups import at_once
from fedlight.callbacks.loop.groups.at_once import AtOnce


@pytest.fixture
def seconds(monkeypatch):
    """Seconds of a pass by number of clients, and the numbers that were tried."""
    tried = []

    def use(times):
        real = AtOnce._seconds

        def measured(self, visits, round_idx):
            real(self, visits, round_idx)  # everything but the clock
            tried.append(len(visits))
            return times[len(visits)]

        monkeypatch.setattr(AtOnce, "_seconds", measured)
        return tried

    return use


@pytest.mark.parametrize(
    ("times", "tried", "expected"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0}, [1, 2, 4], 4),
        ({1: 1.0, 2: 1.2, 4: 3.0}, [1, 2, 4], 2),
        ({1: 1.0, 2: 3.0}, [1, 2], 1),
    ],
)
def test_the_fastest_number_is_taken_and_said_once(times, tried, expected, seconds, caplog):
    seen = seconds(times)
    with caplog.at_level(logging.INFO):
        _, _, groups, _ = fit(Lora(), Points(), "auto", rounds=3)
    assert seen == tried
    assert {len(group) for each in groups for group in each} == {expected}
    said = [record.message for record in caplog.records if "clients_at_once=auto" in record.message]
    assert len(said) == 1
    assert f"auto: {expected} (client steps a second in a trial, by clients at once: 1: 1, 2:" in said[0]


@pytest.mark.parametrize(("times", "same_as"), [({1: 1.0, 2: 3.0}, 1), ({1: 1.0, 2: 1.0, 4: 1.0}, 4)])
def test_a_trial_leaves_no_trace(times, same_as, seconds):
    """Weights, random streams and data: the run is that with the number that was found, bit for bit."""
    seconds(times)
    found, rows, *_ = fit(Lora("AdamW", 0.01, dropout=0.3), Points(), "auto", algorithm=FedProx(0.1))
    given, others, *_ = fit(Lora("AdamW", 0.01, dropout=0.3), Points(), same_as, algorithm=FedProx(0.1))
    assert_equal(found, given)
    assert_same_rows(rows, others, 1e-12)


def test_what_has_no_room_is_not_tried(seconds, monkeypatch):
    seen = seconds({1: 1.0, 2: 1.0, 4: 1.0})
    grown = iter([0, 100, 100, 300])  # before and after each number
    monkeypatch.setattr(at_once, "peak_memory", lambda device, reserved: next(grown))
    monkeypatch.setattr(at_once, "_free", lambda device: 500.0)
    _, _, groups, _ = fit(Lora(), Points(), "auto", rounds=1)
    assert seen == [1, 2]  # four would take 400 of 500 bytes
    assert [len(group) for group in groups[0]] == [2, 2]


def test_a_number_that_does_not_fit_is_left_out(seconds, monkeypatch):
    seconds({1: 1.0, 2: 1.0})
    inner = AtOnce._seconds

    def full(self, visits, round_idx):
        if len(visits) == 4:
            raise torch.OutOfMemoryError("no room")
        return inner(self, visits, round_idx)

    monkeypatch.setattr(AtOnce, "_seconds", full)
    _, _, groups, _ = fit(Lora(), Points(), "auto", rounds=1)
    assert [len(group) for group in groups[0]] == [2, 2]


def test_what_cannot_share_a_batch_is_trained_alone_and_said(caplog):
    class Without(Lora):
        example_losses = None

        def training_step(self, batch, batch_idx):
            return (self.net(batch["x"]) - batch["y"]).square().mean()

        def validation_step(self, batch, batch_idx): ...

    with caplog.at_level(logging.INFO):
        auto, *_ = fit(Without(), Points(), "auto")
    alone, *_ = fit(Without(), Points(), 1)
    assert_equal(auto, alone)
    assert "auto: one client at a time. clients_at_once above 1: Without has no" in caplog.text


def test_without_equal_visits_there_is_nothing_to_try(seconds):
    seen = seconds({})
    clients = {"a": 4, "b": 8, "c": 12}
    beside, *_ = fit(Lora(), Points(clients), "auto", clients_per_round=3, local_steps=None)
    alone, *_ = fit(Lora(), Points(clients), 1, clients_per_round=3, local_steps=None)
    assert seen == []
    assert furthest(beside, alone) == 0


@pytest.mark.parametrize(("size", "most"), [(1, 7), (2, 4), (3, 3), (8, 1)])
def test_no_more_are_tried_than_are_a_process_s_share(size, most, monkeypatch):
    """Seven clients in one batch would leave the second of two processes idle."""
    tried = []

    def all_of_them(self, visits, round_idx):
        tried.append(len(visits))
        return len(visits)

    monkeypatch.setattr(AtOnce, "_try", all_of_them)
    visits = [Visit(name, 2) for name in "abcdefg"]
    found = on_team(monkeypatch, size, lambda rank: AtOnce("auto").number(visits, lambda visit: (), 0))
    assert (found, tried) == ([most] * size, [most])


@pytest.mark.parametrize("setting", ["all", None, True, 2.5])
def test_what_is_no_whole_number_is_refused(setting):
    with pytest.raises(ValueError, match=f"clients_at_once={setting!r} must be a whole number or 'auto'"):
        fit(Lora(), Points(), setting)
