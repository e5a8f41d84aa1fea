"""Buffered rounds of a deployment: nodes whose answers come in a given order, against the emulator and FedBuff's equations."""

import math
import time

import pytest
import torch
from fleets import make_fleet
from nodes_here import ALL_KINDS, Here, deploy, emulate, left_by, make_node, memories_of, two_nodes, visits_of
from plain_lightning import Regression
from safetensors.torch import load
from shared_runs import Kind, digest

from fedlight.callbacks.loop.parts.limits import Limits
from fedlight.devices.fleet import Fleet
from fedlight.federation.algorithm import Average
from fedlight.federation.algorithms.ditto import Ditto
from fedlight.federation.algorithms.fedavg import FedAvg
from fedlight.federation.algorithms.fedprox import FedProx
from fedlight.federation.algorithms.scaffold import Scaffold
from fedlight.federation.asynchronous.fedbuff import FedBuff
from fedlight.federation.channel import Wire
from fedlight.federation.codecs import Quantize, TopK
from fedlight.federation.privacy import PrivateMean
from fedlight.flower.messages import Refused
from fedlight.flower.nodes import NO_ANSWER, Nodes

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about rounds of a few batches
SECONDS = {f"c{i}": 2 + 1.37 * ((7 * i) % 10) + 0.011 * i for i in range(10)}
"""Seconds of each client's work; no two clients are ever through at once."""


class Slow(Here):
    """Nodes here whose answers come after so many seconds of a clock that moves when the server waits."""

    def __init__(self, homes, seconds, **given):
        super().__init__(homes, **given)
        self.seconds, self.now, self.under_way, self.patience = seconds, 0.0, {}, []

    def push(self, node, parcel, timeout):
        (client,) = parcel.header["shares"]
        name = f"{client} {len(self.messages)}"
        answer = self.ask({node: parcel}, timeout).get(node)
        self.under_way[name] = self.now + self.seconds.get(client, 1.0), answer
        return name

    def pull(self, asked, seconds):
        self.patience.append(seconds)
        ends = {name: self.under_way[name][0] for name in asked}
        if seconds and ends:
            self.now = max(self.now, min(ends.values()))
        there = [name for name in asked if ends[name] <= self.now and self.under_way[name][1] is not None]
        return {name: self.under_way.pop(name)[1] for name in there}


def use(monkeypatch, fleet=None, rounds=8, model=lambda: Regression(dropout=0.0), **loop):
    """Let ``buffered`` be the kind of a run on these devices, by default the real ones."""
    fedbuff = loop.pop("fedbuff", FedBuff(2))
    settings = {"algorithm": FedAvg("uniform"), "clients_per_round": 4, "limits": Limits(enforce=True)} | loop
    fleet = fleet or (lambda: Fleet(buffered=fedbuff))
    monkeypatch.setitem(
        ALL_KINDS, "buffered", lambda root: Kind({**settings, "fleet": fleet()}, model, rounds=rounds)
    )


def run(tmp_path, seconds=SECONDS, nodes=2, **more):
    homes = {n: make_node("buffered", tmp_path / f"node{n}", (n - 1, nodes)) for n in range(1, nodes + 1)}
    there = Slow(homes, seconds, **more)
    return there, *deploy("buffered", tmp_path / "server", there)


def columns(rows):
    names = ("round", "client", "asked_round", "staleness", "reason", "bytes_down", "bytes_up", "loss")
    return [tuple(row[name] for name in names) for row in rows]


@pytest.mark.parametrize(
    "loop",
    [
        {},
        {"fedbuff": FedBuff(1, staleness="hinge", a=2.0, b=1), "server": Average(0.5)},
        {"fedbuff": FedBuff(3, concurrency=6), "algorithm": FedProx(0.3)},
        {"channel": Wire(up=[TopK(0.3, error_feedback=True), Quantize("int8")], down=Quantize("fp16"))},
        {"algorithm": Ditto(0.5, 1), "fedbuff": FedBuff(3, concurrency=8)},
    ],
)
def test_clients_that_take_as_long_end_with_the_emulators_bits(tmp_path, monkeypatch, loop):
    """Nothing is drawn in a visit, and the learning rate stays, so the round that trains it does not matter."""
    fedbuff = loop.get("fedbuff", FedBuff(2))
    names = {f"d{i}": {} for i in range(10)}
    dealt = make_fleet(tmp_path / "dealt", **names).assign(SECONDS)
    uploads = {device.name: {"upload_mbps": 0.004 / SECONDS[name]} for name, device in dealt.items()}
    use(monkeypatch, lambda: make_fleet(tmp_path / "timed", buffered=fedbuff, **uploads), **loop)
    emulated = emulate("buffered", tmp_path / "emulated")
    expected = visits_of(tmp_path / "emulated")
    use(monkeypatch, **loop)
    _, *deployed = run(tmp_path)
    rows = visits_of(tmp_path / "server")
    assert columns(rows) == columns(expected)
    assert left_by(*deployed) == left_by(*emulated)
    assert max(int(row["staleness"]) for row in rows) >= 2
    kept = {client: digest(memory) for client, memory in memories_of(tmp_path, deployed[1]).items()}
    assert kept == {client: digest(emulated[1].memory.load(client)) for client in emulated[1].clients}


def test_everybody_at_once_is_fedavg(tmp_path, monkeypatch):
    use(monkeypatch, clients_per_round=10, fedbuff=FedBuff(10), model=Regression, rounds=3)
    _, *deployed = run(tmp_path, dict.fromkeys(SECONDS, 1.0))
    ALL_KINDS["buffered"] = lambda root: Kind(
        {"algorithm": FedAvg("uniform"), "clients_per_round": 10, "limits": Limits(enforce=True)}
    )
    assert left_by(*deployed) == left_by(*emulate("buffered", tmp_path / "emulated"))
