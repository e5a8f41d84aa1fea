import logging

import pytest
import torch
from plain_lightning import Numbers, Regression, ten_clients, trainer

from fedlight import FederatedLoop, FederatedWrapper
from fedlight.callbacks.loop.parts.core_watch import PERIOD_SECONDS, CoreWatch, fewer_threads, waited_seconds

LOGGER = "lightning.pytorch.utilities.rank_zero"


class Machine:
    """Seconds that pass, and for which a number of threads wait."""

    def __init__(self, waiting: float | None):
        self.seconds, self.waiting, self.waited, self.reads = 0.0, waiting, 0.0, 0

    def step(self, seconds: float) -> None:
        self.seconds += seconds
        self.waited += seconds * (self.waiting or 0)

    def read(self) -> float | None:
        self.reads += 1
        return None if self.waiting is None else self.waited

    def watch(self, steps: int, seconds: float, watch: CoreWatch | None = None) -> CoreWatch:
        """Have all steps looked at, which last so long each."""
        watch = watch or CoreWatch(lambda: self.seconds, self.read)
        for _ in range(steps):
            watch.after_batch(None, None)
            self.step(seconds)
        return watch


@pytest.fixture
def threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.parametrize(
    ("number", "seconds", "waited", "better"),
    [
        # measured on two cores: seconds of waiting in 3 seconds, beside 1.3, 1.5 and 1.7 busy cores
        (2, 3.0, 3.90, 1),
        (2, 3.0, 4.53, 1),
        (2, 3.0, 5.04, 1),
        (1, 3.0, 0.87, None),  # one thread waits for its turn, and for nobody else
        (1, 3.0, 2.40, None),
        (2, 3.0, 0.05, None),  # an idle machine
        (2, 60.0, 29.0, None),
        (2, 60.0, 31.0, 1),
        (16, 5.0, 41.0, 8),  # a container with the time of 8 cores
        (64, 5.0, 300.0, 4),
        (4, 5.0, 30.0, 1),  # never below 1
    ],
)
def test_threads_that_wait_are_too_many(number, seconds, waited, better):
    assert fewer_threads(number, seconds, waited) == better


@pytest.mark.parametrize("number", range(2, 40))
def test_the_advice_is_always_fewer(number):
    assert all(1 <= fewer_threads(number, 1.0, waiting / 10) < number for waiting in range(6, 10 * number))


def test_it_is_said_once_after_a_period(threads, caplog):
    machine = Machine(waiting=1.3)
    with caplog.at_level(logging.INFO, LOGGER):
        watch = machine.watch(10, PERIOD_SECONDS / 10)
        assert caplog.messages == []
        machine.watch(200, PERIOD_SECONDS / 10, watch)
    (said,) = caplog.messages
    assert "at any time 1.3 threads of this process wait" in said
    assert "torch's 2 threads" in said
    assert "fedlight --threads 1, or call torch.set_num_threads(1)" in said
    assert machine.reads == 2  # and none afterwards


def test_a_machine_that_becomes_busy_later_is_noticed(threads, caplog):
    machine = Machine(waiting=0.02)
    with caplog.at_level(logging.INFO, LOGGER):
        watch = machine.watch(50, 1.0)
        machine.waiting = 1.0
        machine.watch(50, 1.0, watch)
    assert len(caplog.messages) == 1
    assert 50 / PERIOD_SECONDS <= machine.reads <= 65 / PERIOD_SECONDS


@pytest.mark.parametrize("waiting", [0.1, None])
def test_nothing_is_said_of_free_cores_or_where_nothing_is_counted(threads, waiting, caplog):
    machine = Machine(waiting)
    with caplog.at_level(logging.INFO, LOGGER):
        machine.watch(1000, 0.1)
    assert caplog.messages == []
    assert machine.reads == (1 if waiting is None else 100 / PERIOD_SECONDS)


def test_waiting_is_the_second_number_of_each_thread(tmp_path):
    for name, numbers in {"10": "7000000000 1500000000 12", "11": "0 250000000 3"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(f"{numbers}\n")
    (tmp_path / "12").mkdir()  # has ended
    assert waited_seconds(tmp_path) == 1.75
    (tmp_path / "11/schedstat").write_text("none\n")
    for folder in ("", "12", "nowhere"):
        assert waited_seconds(tmp_path / folder) is None


def test_this_process_is_read_or_not_known():
    first = waited_seconds()
    second = waited_seconds()
    assert (first is None) == (second is None)
    assert first is None or 0 <= first <= second


def test_the_loop_looks_after_every_step(threads, caplog, monkeypatch):
    machine, looked = Machine(waiting=1.3), []

    def clock() -> float:
        looked.append(machine.step(2.0))
        return machine.seconds

    loop = FederatedLoop(clients_per_round=2, local_steps=3)
    kind = "fedlight.callbacks.loop.parts.core_watch.CoreWatch"
    monkeypatch.setattr(kind, lambda: CoreWatch(clock, machine.read))
    with caplog.at_level(logging.INFO, LOGGER):
        trainer(2, [loop]).fit(Regression(), FederatedWrapper(Numbers(), ten_clients))
    assert len(looked) == 2 * 2 * 3
    assert sum("--threads 1" in said for said in caplog.messages) == 1
