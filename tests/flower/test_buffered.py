import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from changed_messages import after_visits
from fleets import make_fleet
from nodes_here import ALL_KINDS, Here, deploy, emulate, left_by, make_node, memories_of, two_nodes, visits_of
from plain_lightning import Regression
from refusals import refusal
from safetensors.torch import load
from shared_runs import Kind, digest

from fedlight import Ditto, FedAvg, FedProx, Fleet, Limits, PrivateMean, Quantize, Scaffold, TopK, Wire
from fedlight.federation import Average
from fedlight.federation.asynchronous import FedBuff
from fedlight.flower import nodes
from fedlight.flower.loops import arrivals
from fedlight.flower.messages import Parcel, Refused
from fedlight.flower.nodes import NO_ANSWER, Nodes

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about rounds of a few batches
PRIMES = (7, 43, 2, 19, 71, 5, 31, 3, 53, 13)
SECONDS = {f"c{i}": math.sqrt(prime) for i, prime in enumerate(PRIMES)}
"""Seconds of each client's work; no two clients are ever through at once."""


class Slow(Here):
    """Nodes here whose answers come after so many seconds of a clock that moves when the server waits."""

    def __init__(self, homes, seconds=None, **given):
        super().__init__(homes, **given)
        self.seconds, self.visits, CLOCK.now = seconds or SECONDS, {}, 0.0

    def push(self, node, parcel, timeout):
        name = super().push(node, parcel, timeout)
        if parcel.header["action"] == "visit":
            (client,) = parcel.header["shares"]
            answer = super().pull([name], 0.0)[name]
            never = node in self.homes and str(answer) == NO_ANSWER
            self.visits[name] = math.inf if never else CLOCK.now + self.seconds[client], answer
        return name

    def pull(self, asked, seconds):
        if not asked.keys() <= self.visits.keys():
            return super().pull(asked, seconds)
        ends = {name: self.visits[name][0] for name in asked}
        until = min(CLOCK.now + seconds, *ends.values(), math.inf)
        assert until < math.inf or not asked  # the server would wait for ever
        CLOCK.now = max(CLOCK.now, until) if asked else CLOCK.now
        there = [name for name, end in ends.items() if end <= CLOCK.now]
        return {name: self.visits.pop(name)[1] for name in there}


class Clock:
    """Clock of a server, in the place of the module ``time``."""

    now = 0.0

    def monotonic(self):
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clocked(monkeypatch):
    for module in (nodes, arrivals):
        monkeypatch.setattr(module, "time", CLOCK)


def use(monkeypatch, fleet=None, rounds=8, model=lambda: Regression(dropout=0.0), **loop):
    """Let ``buffered`` be the kind of a run on these devices, by default the real ones."""
    fedbuff = loop.pop("fedbuff", FedBuff(2))
    loop = {"algorithm": FedAvg("uniform"), "limits": Limits(share=None, enforce=True)} | loop
    loop.setdefault("clients_per_round", 4)
    fleet = fleet or (lambda: Fleet(buffered=fedbuff))
    kind = lambda root: Kind({**loop, "fleet": fleet()}, model, rounds=rounds)  # noqa: E731
    monkeypatch.setitem(ALL_KINDS, "buffered", kind)


def run(tmp_path, **given):
    there = Slow(two_nodes("buffered", tmp_path), **given)
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
    named = {f"d{i}": {} for i in range(10)}
    of_device = {d.name: name for name, d in make_fleet(tmp_path / "dealt", **named).assign(SECONDS).items()}
    uploads = {name: {"upload_mbps": 0.004 / SECONDS[of_device[name]]} for name in named}
    use(monkeypatch, lambda: make_fleet(tmp_path / "timed", buffered=fedbuff, **uploads), **loop)
    emulated = emulate("buffered", tmp_path / "emulated")
    expected = visits_of(tmp_path / "emulated")
    use(monkeypatch, **loop)
    _, *deployed = run(tmp_path)
    rows = visits_of(tmp_path / "server")
    assert columns(rows) == columns(expected)
    assert left_by(*deployed) == left_by(*emulated)
    assert max(int(row["staleness"]) for row in rows) >= 2
    times, emulated_times = (
        torch.tensor([[float(row[name]) for name in ("start_seconds", "arrival_seconds")] for row in each])
        for each in (rows, expected)
    )
    unit = times.max() / emulated_times.max()  # by the bytes that are uploaded
    torch.testing.assert_close(times, emulated_times * unit, rtol=0.01, atol=0.01)
    kept = {client: digest(memory) for client, memory in memories_of(tmp_path, deployed[1]).items()}
    assert kept == {client: digest(emulated[1].memory.load(client)) for client in emulated[1].clients}


def test_everybody_at_once_is_fedavg(tmp_path, monkeypatch):
    use(monkeypatch, clients_per_round=10, fedbuff=FedBuff(10), model=Regression, rounds=3)
    _, *deployed = run(tmp_path, seconds=dict.fromkeys(SECONDS, 1.0))
    ALL_KINDS["buffered"] = lambda root: Kind(
        {"algorithm": FedAvg("uniform"), "clients_per_round": 10, "limits": Limits(enforce=True)}
    )
    assert left_by(*deployed) == left_by(*emulate("buffered", tmp_path / "emulated"))


@pytest.mark.parametrize(
    ("fedbuff", "lr", "weight"),
    [
        (FedBuff(2), 0.7, lambda x: (1 + x) ** -0.5),
        (FedBuff(1, staleness="hinge", a=2.0, b=1), 0.5, lambda x: 1.0 if x <= 1 else 1 / (2 * (x - 1) + 1)),
        (FedBuff(3, concurrency=6, staleness="constant"), 1.0, lambda x: 1.0),
    ],
)
def test_the_equations_of_fedbuff_by_the_messages(tmp_path, monkeypatch, fedbuff, lr, weight):
    """w_{t+1} = w_t + lr / K * sum of s(x_i) (v_i - w_{t - x_i}), where w and v are what messages and answers hold."""
    use(monkeypatch, fedbuff=fedbuff, server=Average(lr), model=Regression, rounds=7)
    there, module, _ = run(tmp_path)
    asked = {}
    for message in there.of("visit"):
        [entry] = message.asked.header["visits"]
        [reply] = message.answer.header["visits"]
        received = load(message.asked.payloads[entry["payload"]])
        answered = load(message.answer.payloads[reply["payload"]])
        asked[message.asked.header["round"], entry["client"]] = received, answered
    rows, models, staleness = visits_of(tmp_path / "server"), [next(iter(asked.values()))[0]], []
    for idx in range(7):
        total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in models[idx].items()}
        arrived = [row for row in rows if int(row["round"]) == idx]
        assert len(arrived) == fedbuff.buffer_size
        for row in arrived:
            stale = int(row["staleness"])
            received, answered = asked[int(row["asked_round"]), row["client"]]
            assert int(row["asked_round"]) == idx - stale
            staleness.append(stale)
            for name, value in received.items():
                torch.testing.assert_close(value, models[idx - stale][name], rtol=0, atol=1e-6)
                total[name] += weight(stale) * (answered[name].double() - value.double())
        step = {name: lr / fedbuff.buffer_size * value for name, value in total.items()}
        models.append({name: (value.double() + step[name]).float() for name, value in models[idx].items()})
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, models[-1][name], rtol=0, atol=1e-6)
    assert max(staleness) >= 2
    assert max((models[-1][name] - models[0][name]).abs().max() for name in models[0]) > 1e-2


def test_the_server_keeps_clients_at_work_and_says_what_it_keeps(tmp_path, monkeypatch):
    use(monkeypatch, fedbuff=FedBuff(2, concurrency=5))
    there, module, loop = run(tmp_path)
    metrics = {name: float(value) for name, value in module.trainer.callback_metrics.items()}
    at_work = loop.remembered()["buffered"]["at_work"]
    assert metrics["fed/at_work"] == len(at_work) == 4  # all but the last who arrive are replaced at once
    assert len(there.visits) == 4  # nobody waited for them
    assert metrics["fed/at_work_bytes_down"] == 4 * 476
    assert metrics["fed/at_work_bytes_up"] == 0
    assert metrics["fed/old_models"] == len({job["asked"] for job in at_work})
    assert metrics["fed/old_model_bytes"] == 196 * metrics["fed/old_models"]
    assert {"fed/staleness", "fed/staleness_max"} <= metrics.keys()
    assert not {"fed/at_work_flops", "fed/at_work_joules"} & metrics.keys()  # nodes do not count these
    rows = visits_of(tmp_path / "server")
    for row in rows:
        assert 0 <= float(row["start_seconds"]) < float(row["arrival_seconds"]) <= loop.virtual_seconds < 60
    assert [len([r for r in rows if r["round"] == str(idx)]) for idx in range(8)] == [2] * 8


def lie(message):
    """Return the answer of a node that has refused, failed, or sent another message, by client."""
    (client,) = message.asked.header.get("shares", [None]) if "visits" in message.asked.header else [None]
    changes = {
        "c2": lambda answer: Refused("the node refuses: no room"),
        "c5": lambda answer: type(answer)(answer.header | {"nonce": "another"}, answer.payloads),
        "c7": lambda answer: type(answer)(answer.header, dict.fromkeys(answer.payloads, b"x")),
        "c0": lambda answer: None,  # it never comes
    }
    return changes.get(client, lambda answer: answer)(message.answer)


def test_clients_of_a_node_that_fails_or_lies_are_free_at_once_and_the_run_goes_on(tmp_path, monkeypatch):
    use(monkeypatch, rounds=12, fedbuff=FedBuff(3, concurrency=5))
    there = Slow(two_nodes("buffered", tmp_path), change=lie)
    _, loop = deploy("buffered", tmp_path / "server", there, deadline_seconds=15.0)
    rows = visits_of(tmp_path / "server")
    reasons = {}
    for row in rows:
        reasons.setdefault(row["client"], set()).add(row["reason"].partition(" (")[0])
    assert reasons.pop("c2") == {"dropped: the node refuses: no room"}
    assert reasons.pop("c5") == {"dropped: refused: its nonce is not that of what was asked"}
    assert reasons.pop("c0") == {f"dropped: {NO_ANSWER}"}
    [of_payload] = reasons.pop("c7")
    assert of_payload.startswith("dropped: a payload has 1 bytes instead of")
    assert {*map(tuple, reasons.values())} == {("",)}
    assert loop.rounds_done == 12
    for idx in range(12):
        of_step = [row for row in rows if row["round"] == str(idx)]
        assert len({row["client"] for row in of_step}) == len(of_step)
        assert len([row for row in of_step if not row["reason"]]) == 3
    for row in rows:
        assert (row["arrival_seconds"] == "") == bool(row["reason"])
        assert int(row["bytes_down"]) > 0


@pytest.mark.parametrize("fedbuff", [FedBuff(2), FedBuff(1, concurrency=1)])
def test_clients_whose_node_is_away_are_absent(tmp_path, monkeypatch, fedbuff):
    use(monkeypatch, rounds=8, fedbuff=fedbuff)
    there = Slow(two_nodes("buffered", tmp_path))

    after_visits(there, 3, lambda: there.homes.pop(2, None))
    _, loop = deploy("buffered", tmp_path / "server", there)
    rows = visits_of(tmp_path / "server")
    assert loop.rounds_done == 8
    away = {name for name, node in loop.nodes._home.items() if node == 2}
    absent = [row for row in rows if row["reason"] == "absent"]
    assert absent
    assert {row["client"] for row in absent} <= away
    assert {(row["bytes_down"], row["bytes_up"]) for row in absent} == {("0", "0")}
    used = [[row["client"] for row in rows if row["round"] == str(i) and not row["reason"]] for i in range(8)]
    assert all(used)  # a step without anybody is none


def test_without_any_node_the_run_stops_with_the_reasons(tmp_path, monkeypatch):
    use(monkeypatch, rounds=20)
    there = Slow(two_nodes("buffered", tmp_path))
    after_visits(there, 9, there.homes.clear)
    with refusal(r"5 rounds in a row, .* had no client that took part: .*absent \("):
        deploy("buffered", tmp_path / "server", there)


class Killed(Exception):
    """Stands for the end of the server's process."""


@pytest.mark.parametrize("at", [1, 2, 5, 9, 14])
def test_a_server_that_is_killed_goes_on_and_counts_those_at_work_as_dropped(tmp_path, monkeypatch, at):
    """Also where clients remember what the wire has lost, by the round that has asked them."""
    channel = {"channel": Wire(up=[TopK(0.3, error_feedback=True)])}
    use(monkeypatch, fedbuff=FedBuff(2, concurrency=5), **channel)

    class Fragile(Slow):
        left = at

        def pull(self, asked, seconds):
            if seconds and self.visits:  # not at the joins
                self.left -= 1
            if not self.left:
                raise Killed
            return super().pull(asked, seconds)

    with pytest.raises(Killed):
        deploy("buffered", tmp_path / "server", Fragile(two_nodes("buffered", tmp_path)))
    saved = sorted((tmp_path / "server/checkpoints").glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns)
    kept = torch.load(saved[-1], weights_only=True)["callbacks"]["FederatedLoop"] if saved else {}
    before = kept.get("buffered", {"at_work": (), "models": {}})
    begun = kept.get("virtual_seconds", 0.0)
    there = Slow(two_nodes("buffered", tmp_path))
    _, loop = deploy("buffered", tmp_path / "server", there)
    rows = visits_of(tmp_path / "server")
    dropped = [row for row in rows if row["reason"]]
    assert {row["reason"] for row in dropped} <= {"dropped: the server stopped while it was at work"}
    assert {(row["client"], int(row["asked_round"])) for row in dropped} == {
        (job["client_id"], job["asked"]) for job in before["at_work"]
    }
    assert {row["bytes_down"] for row in dropped} <= {"476"}
    assert before["models"] == {}  # nobody trains on them any more
    assert loop.rounds_done == 8
    assert not loop.nodes.refused
    first = int(rows[0]["round"]) if not saved else kept["rounds_done"]
    later = [row for row in rows if int(row["round"]) >= first and not row["reason"]]
    assert len(later) == 2 * (8 - first)
    assert all(float(row["start_seconds"]) >= begun for row in later)
    memories = {client: bool(memory) for client, memory in memories_of(tmp_path, loop).items()}
    assert memories == {client: client in loop.last for client in loop.clients}


@pytest.mark.parametrize(
    ("loop", "secure", "complaint"),
    [
        ({"fleet": lambda: Fleet({"pixel_8_pro": 1}, buffered=FedBuff(2))}, False, "set fleet.devices to null"),
        ({"fleet": lambda: Fleet({"pixel_8_pro": 1})}, False, "fleet=Fleet .* leave it out"),
        ({"algorithm": Scaffold()}, False, "buffered rounds: Scaffold has start_round"),
        ({"aggregation": PrivateMean(0.5, 1.0, delta=0.01)}, False, "buffered rounds: epsilon is computed for cohorts"),
        ({}, True, "fleet.buffered does not work with secure-aggregation: .*leave fleet out"),
        ({"fedbuff": FedBuff(2, concurrency=11)}, False, "min-clients=10 is less than the 11 clients .* min-clients=0"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_before_a_client_trains(
    tmp_path, monkeypatch, loop, secure, complaint
):
    use(monkeypatch, **loop)
    there = Slow({})
    with refusal(complaint):
        for n in (1, 2):
            there.homes[n] = make_node("buffered", tmp_path / f"node{n}", (n - 1, 2), secure=secure)
        deploy("buffered", tmp_path / "server", there, secure=secure, min_clients=10)
    assert not there.of("visit")


def test_a_fleet_without_devices_is_one_of_a_deployment_in_buffered_rounds(tmp_path, monkeypatch):
    use(monkeypatch)
    with refusal(r"fleet.devices is null, which are the nodes of a deployment: name emulated"):
        emulate("buffered", tmp_path)
    with refusal(r"fleet.devices is empty: name at least one"):
        Fleet()
    with refusal(r"deadline_seconds=5.0 .* leave them out"):
        Fleet(deadline_seconds=5.0, buffered=FedBuff(2))


def test_a_message_under_way_does_not_hold_its_payloads():
    """Old models would otherwise be held once more, as bytes, and those of one client alone for each client."""
    there = SimpleNamespace(push=lambda node, parcel, timeout: pushed.append(parcel) or "name")
    pushed, asked = [], Nodes(there, "run")
    letter = asked.send("visit", 1, Parcel({"round": 2}, {"model": b"large"}, 5))
    assert pushed[0].payloads == {"model": b"large"}
    assert letter.parcel == replace(pushed[0], payloads={})
    assert asked.traffic.down == pushed[0].num_bytes


def reasons(answers):
    return {name: str(reason) for name, reason in answers.items()}


def test_a_message_that_is_not_taken_or_not_answered_in_time_has_a_reason():
    class Silent:
        names, patience = iter(["", "later", "never"]), []

        def push(self, node, parcel, timeout):
            assert timeout == 0.1
            return next(self.names)

        def pull(self, asked, seconds):
            self.patience.append(seconds)
            CLOCK.now += seconds
            return {name: Refused("busy") for name in asked if name == "later"} if seconds else {}

    asked = Nodes(Silent(), "run", deadline_seconds=0.1)
    letters = {name: asked.send("visit", 1, Parcel({})) for name in ("lost", "later", "never")}
    assert reasons(asked.answers(letters)) == {"lost": NO_ANSWER}
    del letters["lost"]
    assert asked.answers(letters, wait=False) == {}
    assert reasons(asked.answers(letters))["later"] == "busy"
    assert reasons(asked.answers({"never": letters["never"]})) == {"never": NO_ANSWER}
    assert asked.refused[NO_ANSWER] >= 2
    assert max(Silent.patience) <= 0.1
    assert asked.answers({}) == {}
