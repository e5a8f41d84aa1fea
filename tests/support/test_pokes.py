import re
from pathlib import Path

from fedlight.support import pokes

PRIVATE = re.compile(
    r"\btrainer(?:\.\w+)*\._[a-z]|\b(?:fit_loop|connector|_loop)\._(?!run|round|parts)[a-z]|\btorch\._[A-Za-z]"
    r"|\blightning(?:\.\w+)*\._[a-z]|\bfrom (?:lightning|jsonargparse)\S* import .*\b_[A-Za-z]"
    r"|\._(?:every_n_train_steps|train_time_interval|interval|on_before_batch_transfer|apply_batch_transfer_handler)\b"
)
HERE = Path(__file__).parents[2]
ROOMS = ("fedlight", "modules", "datamodules", "callbacks")


def test_no_other_file_reaches_past_a_public_interface():
    files = [file for room in ROOMS for file in (HERE / room).rglob("*.py") if file.name != "pokes.py"]
    found = [
        f"{file.relative_to(HERE)}: {line.strip()}"
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if PRIVATE.search(line)
    ]
    assert len(files) > 300
    assert found == []


def test_each_names_a_test_that_is_there():
    values = [value for value in vars(pokes).values() if callable(value)]
    functions = [value for value in values if value.__module__ == pokes.__name__]
    assert len(functions) > 8
    for function in functions:
        named = re.findall(r"``(tests/[\w/.]+)``", function.__doc__)
        assert named, function
        assert all((HERE / name).exists() for name in named), named
