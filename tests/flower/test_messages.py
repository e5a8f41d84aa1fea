import ast
import importlib
import math
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from ranks import run_ranks

import fedlight.flower
from fedlight.flower.messages import (
    FORMAT,
    Parcel,
    Refused,
    layout_of,
    read_header,
    read_payload,
    value_of,
    write_header,
    write_payload,
)

ROOM = Path(fedlight.flower.__file__).parent
ROOT = Path(__file__).parents[2]
NEED_FLOWER = {"records.py", "client_app.py", "server_app.py"}


def test_a_header_comes_back_with_the_same_bits():
    header = {"format": FORMAT, "x": [0.1, 1e-320, -0.0, 2**62], "client": "Zoë 🙂", "no": None, "yes": True}
    found = read_header(write_header(header))
    assert found == header
    assert str(found["x"][2]) == "-0.0"
    parcel = Parcel({"format": FORMAT}, {"p": b"123", "q": b"4567"})
    assert parcel.num_bytes == len(b'{"format":1}') + 7


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object(), b"bytes", torch.ones(1)])
def test_what_is_no_plain_value_is_not_written(value):
    with pytest.raises(ValueError, match=r"JSON|plain values"):
        write_header({"format": FORMAT, "x": value})


def test_a_payload_comes_back_with_the_same_bits_in_the_same_order():
    tensors = {"z": torch.randn(3, 4), "b": torch.arange(5, dtype=torch.uint8), "c": torch.randn(2).half()}
    tensors |= {f"{number * 7 % 10}": torch.randn(1) for number in range(10)}
    found = read_payload(write_payload(tensors), layout_of(tensors))
    assert [*found] == [*tensors]  # a norm of all adds up in this order
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert write_payload({}) == b""
    assert read_payload(b"", {}) == {}
    with pytest.raises(Refused, match="none was due"):
        read_payload(b"x", {})


@pytest.mark.parametrize(
    ("value", "kind"),
    [(True, int), (True, float), (1, str), (None, dict), (2**63, int), (-(2**63), int), (math.nan, float)],
)
@pytest.mark.parametrize("default", [(), (7,)])
def test_a_value_of_another_type_is_refused_and_a_missing_one_without_a_default(value, kind, default):
    with pytest.raises(Refused, match=r"^x in the header is"):
        value_of({"x": value}, "x", kind, *default)
    if default:
        assert value_of({}, "x", kind, *default) == 7
    else:
        with pytest.raises(Refused):
            value_of({}, "x", kind)


def imports_of(path):
    tree = ast.parse(path.read_text())
    names = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name for name in names if name.split(".")[0] == "flwr"}


def test_flower_itself_is_imported_in_four_files_and_by_its_documented_names_alone():
    """Its other modules move from one version to the next."""
    places = [ROOM.parent, *(ROOT / name for name in ("callbacks", "modules", "datamodules", "examples"))]
    imported = {path: imports_of(path) for place in places for path in place.rglob("*.py")}
    assert {path.name for path, names in imported.items() if names} == NEED_FLOWER
    assert set().union(*imported.values()) == {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
    # The other files do not reach it through these.
    needing = {f"fedlight.flower.{name.removesuffix('.py')}" for name in NEED_FLOWER}
    for path in [one for one in ROOM.rglob("*.py") if one.name not in NEED_FLOWER]:
        assert not [name for name in needing if name in path.read_text()], path


def test_server_and_node_are_there_without_flower_until_sums_are_masked(tmp_path):
    """In a fork, which has imported what the package itself needs."""

    def work(rank):
        for name in [*sys.modules]:
            if name.split(".")[0] in ("fedlight", "flwr", "cryptography"):
                del sys.modules[name]
        sys.modules |= {"flwr": None, "cryptography": None}
        StrategyRegistry.pop("client_parallel", None)  # it is registered when it is imported
        importlib.import_module("fedlight.flower.server")
        importlib.import_module("fedlight.flower.node")

    run_ranks(1, work, tmp_path)


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_a_parcel_comes_back_from_flowers_records(size):
    pytest.importorskip("flwr")
    from fedlight.flower.records import from_record, to_record

    parcel = Parcel({"format": FORMAT, "client": "Zoë"}, {"p": bytes(range(256)) * size} if size else {})
    assert from_record(to_record(parcel)) == parcel


def test_other_records_of_flower_are_refused():
    flwr = pytest.importorskip("flwr.app")
    from fedlight.flower.records import HEADER, PAYLOADS, RECORD, from_record, to_record

    good = to_record(Parcel({"format": FORMAT}, {"p": b"123"}))
    pickled = flwr.Array(dtype="float32", shape=(3,), stype="numpy.ndarray", data=b"123")
    for record in (
        flwr.RecordDict(),
        flwr.RecordDict({RECORD: good[RECORD]}),
        flwr.RecordDict({RECORD: flwr.ConfigRecord({HEADER: "text"}), PAYLOADS: good[PAYLOADS]}),
        flwr.RecordDict({RECORD: flwr.ConfigRecord({}), PAYLOADS: good[PAYLOADS]}),
        flwr.RecordDict({RECORD: flwr.ConfigRecord({HEADER: b"\xff"}), PAYLOADS: good[PAYLOADS]}),
        flwr.RecordDict({RECORD: good[RECORD], PAYLOADS: flwr.ArrayRecord({"p": pickled})}),
    ):
        with pytest.raises(Refused):
            from_record(record)
