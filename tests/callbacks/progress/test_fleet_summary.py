import io

from rich.console import Console

from fedlight.callbacks.progress.run_summary import device_table, device_totals

COLUMNS = (
    "round client device reason bytes_down bytes_up download_seconds compute_seconds upload_seconds joules"
)
ROWS = """
0 a phone - 1000000 500000 1 10 2 130
0 a phone - 1000000 500000 1 10 2 130
0 b phone late 1000000 250000 1 20 1 220
1 a phone absent 0 0 0 0 0 0
1 c board - 2000000 2000000 0.5 3600 0.5 36010
1 d board surplus 2000000 0 0.5 1799 0 18000
"""


def rows():
    for line in ROWS.split("\n")[1:-1]:
        values = ["" if value == "-" else value for value in line.split()]
        end = {"round_end_seconds": f"{5400 * (1 + int(values[0]))}"}
        yield dict(zip(COLUMNS.split(), values, strict=True)) | end


def test_totals_by_device_count_a_client_once_a_round():
    totals = device_totals(rows())
    assert list(totals) == ["board", "phone"]
    phone = totals["phone"]
    assert (len(phone.clients), len(phone.asked), phone.took_part) == (2, 3, 1)
    assert dict(phone.dropped) == {"late": 1, "absent": 1}
    assert (phone.bytes_down, phone.bytes_up, phone.seconds, phone.joules) == (3e6, 1.25e6, 48.0, 480.0)


def test_the_table_has_a_line_per_device_and_one_for_all():
    table = device_table(list(rows()))
    assert table.title == "2 rounds in 3 hours of simulated time"
    cells = [list(column.cells) for column in table.columns]
    lines = dict(zip(cells[0], zip(*cells[1:], strict=True), strict=True))
    # reasons that nobody had are left out
    headers = ["clients", "asked", "took part", "absent", "late", "surplus"]
    assert [column.header for column in table.columns][1:7] == headers
    assert lines["board"] == ("2", "2", "1", "0", "0", "1", "4", "2", "1.5", "54")
    assert lines["all"] == ("4", "5", "2", "1", "1", "1", "7", "3.25", "1.51", "54.5")


def test_a_terminal_of_80_columns_shows_whole_words():
    console = Console(file=io.StringIO(), width=80)
    console.print(device_table([{**row, "device": "galaxy_s24_ultra"} for row in rows()]))
    assert "galaxy_s24_ultra" in console.file.getvalue()
    assert "…" not in console.file.getvalue()
