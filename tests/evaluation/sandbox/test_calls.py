import os
import threading
from collections import Counter, OrderedDict, namedtuple
from decimal import Decimal
from fractions import Fraction

import pytest

from fedlight.evaluation.sandbox.calls import Remote, pack, receive, send, serve, unpack

Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -(1 << 63), 1 << 63, 1.5, float("inf"), 2 - 3j, "ü\n\ud800", b"\x00\xff"),
        [],
        [1, [2, (3,)]],
        (),
        {1, "a", (2, 3)},
        {"a": {1: [None]}, (1, 2): {"list": 3}},
        Fraction(1, 3),
        Decimal("0.1"),
        pytest.param(-(10**6000), id="many digits"),
    ],
)
def test_values_come_back_with_their_types(value: object) -> None:
    found = unpack(pack(value))
    assert found == value
    assert type(found) is type(value)


def test_subclasses_come_back_as_their_base() -> None:
    assert unpack(pack(Counter("aab"))) == {"a": 2, "b": 1}
    assert type(unpack(pack(OrderedDict(a=1)))) is dict
    assert unpack(pack(Pair(1, 2))) == (1, 2)
    assert unpack(pack({"a": 1}.keys())) == unpack(pack(frozenset({"a"}))) == {"a"}
    assert str(unpack(pack(float("nan")))) == "nan"


@pytest.mark.parametrize("value", [object(), len, (n for n in range(3)), range(3), [object()], {"a": print}])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="is no plain value"):
        pack(value)


def test_a_list_in_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(RecursionError):
        pack(value)


def test_calls_over_pipes() -> None:
    (asked, asks), (answered, answers) = os.pipe(), os.pipe()
    server = threading.Thread(target=serve, args=(divmod, asked, answers))
    server.start()
    remote = Remote(asks, answered)
    assert remote(7, 2) == (3, 1)
    assert remote(10**30, 7) == divmod(10**30, 7)
    with pytest.raises(RuntimeError, match="the function failed: ZeroDivisionError"):
        remote(1, 0)
    with pytest.raises(RuntimeError, match="the function failed: TypeError"):
        remote(1, named=2)
    os.close(asks)
    server.join(5)
    assert not server.is_alive()
    os.close(answers)
    with pytest.raises(EOFError):
        receive(answered)
    for pipe in (asked, answered):
        os.close(pipe)


def test_long_messages_are_sent_in_parts() -> None:
    reads, writes = os.pipe()
    received = []
    reader = threading.Thread(target=lambda: received.append(receive(reads)))
    reader.start()
    send(writes, "x" * 1_000_000)
    reader.join(10)
    assert received == ["x" * 1_000_000]
    os.close(reads)
    os.close(writes)
