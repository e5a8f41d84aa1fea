from pathlib import Path

import lightning as L
import pytest
from judges import Grouping, fit

from fedlight import RoundProgress, VisitLog
from fedlight.callbacks.attacks.records import AttackTable
from fedlight.callbacks.logs import ClientAccuracy, GroupLog
from fedlight.callbacks.loop.parts.privacy_account import PrivacyAccount
from fedlight.callbacks.loop.round_table import RoundTable
from fedlight.federation import Identity
from fedlight.federation.privacy import PrivateMean, sampled_epsilon

COUNTS = Path("/proc/self/io")
counted = pytest.mark.skipif(not COUNTS.exists(), reason="Linux counts the bytes that a process reads")


def bytes_read() -> int:
    """Return the bytes that this process has read, without those of this count."""
    text = COUNTS.read_text()
    read = int(text.split()[1]) - bytes_read.own  # the count has not counted itself yet
    bytes_read.own += len(text)
    return read


bytes_read.own = 0


def read_by_round(rounds, work):
    """Return for each round the bytes that ``work(round)`` reads."""
    read = []
    for number in rounds:
        before = bytes_read()
        work(number)
        read.append(bytes_read() - before)
    return read


@counted
def test_a_table_by_rounds_reads_nothing_in_a_round(tmp_path):
    table = RoundTable(tmp_path / "visits.csv")

    def one_round(number):
        table.append([{"round": number, "client": f"c{n}", "loss": 0.5} for n in range(4)])
        return table.state_dict()

    assert set(read_by_round(range(300), one_round)) == {0}
    assert len(table.rows()) == 1200


@counted
def test_attacks_read_the_last_round_alone(tmp_path):
    tables = [AttackTable(tmp_path / "attacks.csv", name) for name in ("one", "other")]

    def one_round(number):
        for at, table in enumerate(tables):
            if number % (at + 1) == 0:
                table.put(number, {"c1": {"exact": 0.5}, "global": {"exact": 0.25}})
                assert table.digest

    read = read_by_round(range(100, 700), one_round)
    assert read[10:12] == read[-2:]  # of an odd and an even round
    assert max(read[-2:]) < 500 < (tmp_path / "attacks.csv").stat().st_size / 20
    twin = AttackTable(tmp_path / "attacks.csv", "one")
    twin.restart(699, tables[0].digest)
    assert twin.digest == tables[0].digest
    rows = twin.rows()
    assert list(rows) == [(number, target) for number in range(100, 700) for target in ("c1", "global")]
    assert rows[698, "c1"] == {"one/exact": "0.5", "other/exact": "0.5"}
    assert rows[699, "global"] == {"one/exact": "0.25"}


class Regrouping(Grouping):
    """Groups in every round."""

    def start_round(self, round_idx, cohort, federation):
        super().start_round(3, cohort, federation)
        self.grouped_round = round_idx


class Reads(L.Callback):
    """Bytes that are read from the start of a round to the start of the next, with a checkpoint saved in each."""

    def __init__(self):
        self.rounds, self.sizes, self._before = [], [], 0

    def on_train_epoch_start(self, trainer, pl_module):
        now = bytes_read()
        self.rounds.append(now - self._before)
        self._before = now

    def on_train_epoch_end(self, trainer, pl_module):
        file = Path(trainer.default_root_dir, "one.ckpt")
        trainer.save_checkpoint(file)
        self.sizes.append(file.stat().st_size)


@counted
def test_a_round_of_a_run_reads_as_much_as_any_other(tmp_path):
    reads, logs = Reads(), [VisitLog(), GroupLog(), ClientAccuracy()]
    fit(tmp_path, *logs, reads, algorithm=Regrouping(), rounds=60)
    assert reads.rounds[12] == reads.rounds[55]
    assert reads.sizes[12] == reads.sizes[55]
    for log, rows in zip(logs, (60 * 3, 60 * 4, 60 * 4), strict=True):
        assert len(log._table.rows()) == rows


def test_private_rounds_are_counted():
    account = PrivacyAccount(PrivateMean(1.0, 4.0), Identity())
    found = [account.after(asked, 10) for asked in ("abc", "cde", "ab", "bcd")]
    assert account.rounds == {(3, 10): 3, (2, 10): 1}
    assert found[-1]["epsilon"] == sampled_epsilon(4.0, 1e-5, [(3, 10), (3, 10), (2, 10), (3, 10)])
    known = PrivateMean(1.0, 4.0, secret_sampling=False)
    assert known.spent(account.rounds) == known.spent([(3, 10)] * 4)


def test_progress_keeps_no_list_of_rounds(tmp_path):
    def size(rounds):
        bar = RoundProgress()
        fit(tmp_path, bar, rounds=rounds, enable_progress_bar=True)
        values = [*vars(bar._time_left).values(), *vars(bar._metrics).values()]
        return sum(len(value) for value in values if hasattr(value, "__len__"))

    assert size(3) == size(9)
