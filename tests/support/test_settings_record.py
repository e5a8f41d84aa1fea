import dataclasses
import datetime
import enum
import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlight.support.settings_record import constructor_arguments, described, digest, refuse_other_settings

HERE = f"{__name__}."


class Plain:
    def __init__(self, rate, names=("b", "a")):
        self.rate, self.names = rate, names
        self._cache = {"when": id(self)}


class Renamed:
    def __init__(self, rate):
        self._speed = rate
        self._seen = 0


class Passing(Plain):
    def __init__(self, extra, **kwargs):
        super().__init__(**kwargs)
        self.extra = extra


@dataclasses.dataclass(frozen=True)
class Record:
    size: int
    inner: object = None


class Slotted:
    __slots__ = ("x",)


class Kind(enum.Enum):
    ONE = 1


def test_objects_are_their_class_and_what_they_were_given():
    assert described(Plain(0.5)) == {"class": HERE + "Plain", "rate": 0.5, "names": ["b", "a"]}
    assert described(Renamed(2)) == {"class": HERE + "Renamed", "speed": 2, "seen": 0}
    assert constructor_arguments(Passing) == ["extra", "rate", "names"]
    passing = {"class": HERE + "Passing", "rate": 1, "names": ["b", "a"], "extra": None}
    assert described(Passing(None, rate=1)) == passing
    inner = {"class": HERE + "Record", "size": 4, "inner": None}
    assert described(Record(3, Record(4))) == {"class": HERE + "Record", "size": 3, "inner": inner}
    assert described(Slotted()) == {"class": HERE + "Slotted"}


def test_other_values_are_plain_too():
    values = [Path("a/b"), Kind.ONE, Plain, digest, {3, 1}, range(2), np.float32(0.5), torch.tensor(3)]
    assert described(values)[:3] == ["a/b", "Kind.ONE", HERE + "Plain"]
    assert described(values)[3:] == ["fedlight.digest", [1, 3], [0, 1], 0.5, 3]
    weights = described(torch.tensor([1.0, 2.0]))
    assert weights == described(torch.tensor([1.0, 2.0]))
    assert weights.startswith("float32 (2,) ")
    assert weights != described(torch.tensor([1.0, 3.0]))
    assert described([*range(2000)]).startswith("2000 items, digest ")
    assert described([*range(2000)]) != described([*range(1999), 0])
    assert described({i: i for i in range(2000)}) == described({i: i for i in reversed(range(2000))})
    around = Plain(1)
    around.rate = [around]
    assert described(around)["rate"] == [{"class": HERE + "Plain"}]


@pytest.mark.parametrize(
    ("saved", "own", "said"),
    [
        (Plain(1), Plain(2), "x.rate=1 and goes on with it, not with x.rate=2: give the same, or y"),
        (Plain(1), Renamed(1), f"x={HERE}Plain and goes on with it, not with x={HERE}Renamed: give"),
        ([1, Plain(1)], [1, Plain(2)], r"x\[1\].rate=1 and goes on with it, not with x\[1\].rate=2"),
        ([1], [1, 2], r"x=\[1\] and goes on with it, not with x=\[1, 2\]"),
        ({"a": 1}, {"b": 1}, "x.a=1 and goes on with it, not with x.a=nothing; x.b=nothing, not 1: give"),
        (None, Plain(1), f"x=None and goes on with it, not with x={HERE}Plain"),
        (b"a", b"b", "x=b'a' and goes on"),
        (torch.float32, torch.bfloat16, "x=torch.float32 and goes on with it, not with x=torch.bfloat16"),
        (
            functools.partial(max, 1),
            functools.partial(max, 2),
            r"x.args\[0\]=1 and goes on with it, not with",
        ),
        (np.datetime64("2020-01-01"), datetime.date(2021, 1, 1), "x=datetime.date"),
        (
            dict.fromkeys("abcde", 1),
            dict.fromkeys("abcde", 2),
            "x.a=2; x.b=1, not 2; x.c=1, not 2; and 2 more: give",
        ),
    ],
)
def test_differences_are_named(saved, own, said):
    with pytest.raises(ValueError, match=said):
        refuse_other_settings({"x": described(saved)}, {"x": described(own)}, "y")


def test_what_only_one_version_or_another_file_knows_is_no_difference():
    newer = described(Plain(1)) | {"since": 3}
    refuse_other_settings({"x": described(Plain(1)), "gone": 1}, {"x": newer, "new": 2}, "y")
    refuse_other_settings({"x": float("nan")}, {"x": float("nan")}, "y")

    def saved(name):
        return {"x": {"class": name, "rate": 1}}

    now = saved("fedlight.BufferPolicy")
    refuse_other_settings(saved("fedlight.callbacks.buffers.BufferPolicy"), now, "start anew")
    refuse_other_settings({"f": "fedlight.partition.iid"}, {"f": "fedlight.iid"}, "start anew")
    for other in ("fedlight.callbacks.buffers.Average", "mine.BufferPolicy"):
        with pytest.raises(ValueError, match="not with x=fedlight"):
            refuse_other_settings(saved(other), now, "start anew")


def test_digests_differ_by_content_and_by_where_it_is_cut():
    assert digest("ab", "c") != digest("a", "bc")
    assert digest(np.array([1, 2])) == digest(np.array([0, 1, 2])[1:])
    assert digest(np.array([1, 2])) != digest(np.array([2, 1]))
