import io

import pytest
from judges import Dies, Grouping, Margins, Saves, fit
from rich.console import Console

from fedlight.callbacks.attacks.records import AttackTable
from fedlight.callbacks.logs import ClientAccuracy, ClientData, VisitLog
from fedlight.callbacks.logs.group_log import GroupLog, read_selectors
from fedlight.callbacks.progress.round_progress import RoundProgress, name_clients
from fedlight.runs.run import Run
from fedlight.support.console import one_line_errors
from fedlight.support.files import read_csv

IDS = {"a": "=1+1", "b": "\x1b[31mred", "c": "nul\0", "d": '"@d"'}
TABLES = ("visits.csv", "groups.csv", "clients.csv", "data.csv")


class OddIds(Margins):
    def __init__(self):
        super().__init__(groups={name: f"+{name}" for name in IDS.values()})

    def setup(self, stage):
        super().setup(stage)
        self.client_indices = {IDS[client]: rows for client, rows in self.client_indices.items()}
        self.val_client_indices = self.test_client_indices = self.client_indices


class OddGroups(Grouping):
    def start_round(self, round_idx, cohort, federation):
        super().start_round(round_idx, cohort, federation)
        self.groups = {IDS.get(client, client): group for client, group in self.groups.items()}


def run(folder, *callbacks, **options):
    logs = VisitLog(), GroupLog(), ClientAccuracy(), ClientData()
    fit(folder, *logs, *callbacks, algorithm=OddGroups(), data=OddIds(), **options)
    return {name: (folder / name).read_bytes() for name in TABLES}


def test_tables_hold_them_quoted_and_readers_find_them(tmp_path):
    files = run(tmp_path)
    for data in files.values():
        assert not set(data) & ({*range(32), 127} - {ord("\n")})
        cells = data.replace(b"\n", b",").split(b",")
        assert not any(cell.startswith((b"=", b"+", b"@")) for cell in cells)
    for name in TABLES:
        assert {row["client"] for row in read_csv(tmp_path / name)} == {*IDS.values()}
    assert read_selectors(tmp_path / "groups.csv")[0] == {"=1+1": 0, "\x1b[31mred": 2, "nul\0": 1, '"@d"': 1}
    known = {row["known_group"] for row in read_csv(tmp_path / "groups.csv")}
    assert known == {f"+{name}" for name in IDS.values()}
    shown = {row["client"] for row in Run(tmp_path, "", "run", tmp_path).csv("visits.csv")}
    assert shown == {"=1+1", "␛[31mred", "nul␀", '"@d"'}


def test_a_resumed_run_leaves_the_same_tables(tmp_path):
    whole = without_seconds(run(tmp_path / "whole"))
    with pytest.raises(KeyError, match="killed"):
        run(tmp_path / "resumed", Dies(2, "batch"), Saves())
    resumed = run(tmp_path / "resumed", ckpt_path=tmp_path / "resumed/end1.ckpt")
    assert without_seconds(resumed) == whole


def without_seconds(files):
    return files | {"visits.csv": [line.rsplit(b",", 2)[0] for line in files["visits.csv"].splitlines()]}


def test_attacks_hold_them_quoted(tmp_path):
    table = AttackTable(tmp_path / "attacks.csv", "one")
    for number in (1, 2):
        table.put(number, {name: {"exact": 0.5} for name in IDS.values()})
    assert "\n" + r'2,"""\u001b[31mred""",0.5' + "\n" in (tmp_path / "attacks.csv").read_text()
    assert {target for _, target in table.rows()} == {*IDS.values()}
    AttackTable(tmp_path / "attacks.csv", "one").restart(2, table.digest)


def test_a_terminal_gets_no_control_characters_of_theirs(tmp_path):
    bar = RoundProgress(refresh_seconds=0.0)
    bar.console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=100)
    run(tmp_path, bar, rounds=2, enable_progress_bar=True)
    shown = bar.console.file.getvalue()
    assert "\x1b[31m" not in shown
    assert "\0" not in shown
    assert name_clients([IDS["b"]], "phone") == r'client "\u001b[31mred" on phone'
    assert name_clients(["c001"], "") == "client c001"


def test_an_error_of_a_command_has_no_control_characters(capsys):
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise ValueError(f"client {IDS['b']}: no rows")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(r"fedlight: client \u001b[31mred: no rows")
