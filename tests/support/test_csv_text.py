import random

import pytest

from fedlight.support.files import csv_rows, csv_text, printable, quoted, read_csv, unquoted, write_whole

PLAIN = ["", "c001", "-1.5", "+1", "1e-05", "-inf", "nan", "x, y", 'say "hi"', "a\nb", "é 😀", "'=1"]
PLAIN += ["\\x1b", "-", "a=b"]
ODD = {
    "=\n1+1": '"=\n1+1"',
    "=1+1": '"=1+1"',
    "+cmd|' /C calc'!A0": "\"+cmd|' /C calc'!A0\"",
    "-2+3": '"-2+3"',
    "@SUM(A1)": '"@SUM(A1)"',
    "\tx": r'"\u0009x"',
    "\r=1": r'"\u000d=1"',
    "\x1b[31mred": r'"\u001b[31mred"',
    "nul\0": r'"nul\u0000"',
    "\ud800": r'"\ud800"',
    "\ud83d\ude00 in halves": r'"\ud83d\ude00 in halves"',
    '"quoted"': r'"\u0022quoted\u0022"',
    "=\\": r'"=\u005c"',
}


@pytest.mark.parametrize("text", PLAIN)
def test_plain_text_and_numbers_stay_as_they_are(text):
    assert quoted(text) == unquoted(text) == text


@pytest.mark.parametrize(("text", "cell"), ODD.items())
def test_odd_text_is_a_json_string(text, cell):
    assert quoted(text) == cell
    assert unquoted(cell) == text
    assert quoted(cell) != cell  # text that looks like a quoted one is quoted as well


def test_numbers_names_of_columns_and_rows_that_are_not_whole():
    rows = [{"a": -1.5, "b": -3, "c": float("-inf"), "d": None, "e": True}]
    assert csv_text(rows) == "a,b,c,d,e\n-1.5,-3,-inf,,True\n"
    assert csv_text([{"=a": 1}]) == '"""=a"""\n1\n'
    assert csv_rows(csv_text([{"=a": 1}])) == [{"=a": "1"}]
    assert csv_rows("a,b\n1\n1,2,3\n") == [{"a": "1", "b": None}, {"a": "1", "b": "2", None: ["3"]}]
    assert csv_rows("") == []
    assert printable("é \x1b]0;x\x07\x9b") == r"é \u001b]0;x\u0007\u009b"


def test_every_text_comes_back_from_a_file(tmp_path):
    draw = random.Random(0)
    letters = [*"\"\\u001b0'=+-@ab,;\n\r\t\0\x1b\x7f\x85é😀", "\ud83d", "\ude00", "\u202e"]
    texts = ["".join(draw.choices(letters, k=draw.randrange(8))) for _ in range(3000)]
    rows = [{"round": str(number), "client": text} for number, text in enumerate([*PLAIN, *ODD, *texts])]
    write_whole(tmp_path / "a.csv", csv_text(rows))
    assert read_csv(tmp_path / "a.csv") == rows
    data = (tmp_path / "a.csv").read_bytes()
    assert not set(data) & ({*range(32), 127} - {ord("\n")})
    assert csv_text(read_csv(tmp_path / "a.csv")).encode() == data
