"""Broken and hostile replies: each is refused with a reason that is counted, and the model is as without the client."""

import json
import struct
from functools import partial

import changed_messages as changes
import pytest
import torch
from changed_messages import odd_values
from lightning.pytorch.callbacks import Callback
from nodes_here import ALL_KINDS, FakeNode, Here, Kind, deploy, make_node, two_nodes, visits_of
from shared_runs import digest

from fedlight.flower.messages import Bounds, Parcel, Refused, read_header
from fedlight.flower.nodes import MOST_REASONS, OTHER_BASE, OTHER_REASONS, Nodes

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of Lightning, about rounds of one batch
    pytest.mark.slow,  # hundreds of deployments
]

HOSTILE = "c9"
OTHERS = [f"c{i}" for i in range(9)]
DEEP = json.loads("[" * 400 + "]" * 400)
NAN, INF = float("nan"), float("inf")
ODD = [None, True, -1, 2**70, 1e308, NAN, INF, "", "x" * 1000, [], {}, [[]], DEEP]
FITTING = dict.fromkeys(("payload", "label", "client", "steps", "seconds"), ()) | {
    "diverged": ["", "x" * 1000],  # such a client says itself that it is left out
    "names": [None],
    "loss": [None, -1],
    "training": [{}],
}
"""Field of a visit -> those of the odd values that it may have."""


def of_answer(change, *given_and_message):
    *given, message = given_and_message
    return change(*given, message.answer)


# Changes of a message's answer, as partials: their text says what they are where they are taken.
with_header, without_header, with_field, with_payload, with_tensors = (
    partial(partial, of_answer, getattr(changes, name))
    for name in ("with_header", "without_header", "with_visit", "with_payload", "with_tensors")
)


def without_field(name, message):
    [visit] = message.answer.header["visits"]
    return with_header("visits", [{k: v for k, v in visit.items() if k != name}])(message)


def with_visits(change, message):
    return with_header("visits", change(message.answer.header["visits"][0]))(message)


def with_payloads(change, message):
    [(name, data)] = message.answer.payloads.items()
    return Parcel(message.answer.header, change(name, data))


def first_of(tensors, value):
    """Put a value into the first number of one tensor."""
    name = next(name for name, each in tensors.items() if each.is_floating_point())
    found = {n: each.clone() for n, each in tensors.items()}
    found[name].view(-1)[0] = value
    return found


def renamed(tensors):
    """Give one tensor another name of the same length."""
    name = sorted(tensors)[0]
    return {("Z" + n[1:] if n == name else n): each for n, each in tensors.items()}


def turned(tensors):
    """Turn the largest matrix, or cut the vector in two rows, whose bytes are as many."""
    name = max(tensors, key=lambda n: tensors[n].numel())
    value = tensors[name]
    return tensors | {name: value.reshape(value.shape[::-1]) if value.ndim > 1 else value.reshape(1, -1)}


def as_integers(tensors):
    return {n: each.view(torch.int32) if each.dtype == torch.float32 else each for n, each in tensors.items()}


def crafted(header):
    """Return a safetensors file with a header of our own and some bytes."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * 64


def of_length(data, made):
    """Fill a crafted file up to the length that is due, with spaces in its header as the format has them."""
    size = struct.unpack("<Q", made[:8])[0]
    text = made[8 : 8 + size]
    room = len(data) - 8 - 64 - len(text)
    return struct.pack("<Q", len(text) + room) + text + b" " * room + b"\0" * 64 if room >= 0 else made


HEADERS = [
    *(without_header(name) for name in ("action", "run", "nonce", "round", "visits")),
    *(with_header("action", value) for value in ("join", "prepare", 7, None)),
    *(with_header("run", value) for value in ("another", "", None, 3)),
    *(with_header("nonce", value) for value in ("0" * 32, "", None, [1])),
    *(with_header("round", value) for value in (10**6, -1, None, "1", 0.5)),
    *(
        with_header("visits", value)
        for value in ODD
        if not (isinstance(value, list) and value and value is not DEEP and value != [[]])
    ),
]
FIELDS = [
    *(partial(without_field, n) for n in FITTING if n not in ("names", "loss", "payload")),
    *(with_field(*pair) for pair in odd_values(FITTING, ODD)),
    *(with_field("client", other) for other in ("c0", "c10", HOSTILE + "\0", "C9")),
    *(with_field("label", other) for other in ("synthetic", "train ", "Train")),
    *(with_field("names", names) for names in (["net.0.weight"], ["other"], [1], [["net.0.weight"]])),
    *(with_field("training", {"loss": pair}) for pair in ([1, 0], [1, -3], [NAN, 2], [INF, 2], [2**70, 1])),
    *(with_field("training", {"loss": pair}) for pair in ([1], [1, 2, 3], [True, 2], [1, True], ["1", 2])),
    *(
        with_field("training", {name: [1.0, 2]})
        for name in ("", "x" * 101, "a\nb", "x/dataloader_idx_0", "\ud800")
    ),
    with_field("training", {"loss": [1e308, 1]}),
    *(with_field("steps", value) for value in (2.0, 10**9, "2")),
    *(with_field("seconds", value) for value in (1e10, 10**400, "2", -0.5)),
]
VISITS = [
    partial(with_visits, lambda visit: []),
    partial(with_visits, lambda visit: [visit, visit]),
    partial(with_visits, lambda visit: [visit, visit | {"client": "c0"}]),
    partial(with_visits, lambda visit: [visit, visit | {"label": "synthetic", "payload": None}]),
    partial(with_visits, lambda visit: [visit, 7]),
    partial(with_visits, lambda visit: [visit] * 5000),
]
PAYLOADS = [
    *(with_payload(lambda data, size=size: data[:size]) for size in (0, 1, 7, 8, 40, -1)),
    with_payload(lambda data: data + b"\0"),
    with_payload(lambda data: data * 50),
    with_payload(lambda data: b"\0" * len(data)),
    with_payload(lambda data: b"\xff" * len(data)),
    with_payload(lambda data: b"\x80\x04" + b"c" * (len(data) - 2)),  # as a pickle begins
    with_payload(lambda data: data[::-1]),
    with_payload(lambda data: struct.pack("<Q", 2**63) + data[8:]),
    with_payload(lambda data: data[:8] + b"\xff" + data[9:]),
    *(
        with_payload(lambda data, made=made: of_length(data, crafted(made)))
        for made in (
            {},
            {"w": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 64]}},
            {"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 64]}},
            {"w": {"dtype": "F32", "shape": [16], "data_offsets": [64, 0]}},
            {"w": {"dtype": "object", "shape": [16], "data_offsets": [0, 64]}},
            {"__metadata__": {"x": "y"}},
        )
    ),
    partial(with_payloads, lambda name, data: {}),
    partial(with_payloads, lambda name, data: {name: data, "more": data}),
    partial(with_payloads, lambda name, data: {"p7": data}),
    with_tensors(renamed),
    with_tensors(turned),
    with_tensors(as_integers),
    with_tensors(lambda tensors: {n: v.double() for n, v in tensors.items()}),
    with_tensors(lambda tensors: dict([*tensors.items()][1:])),
    with_tensors(lambda tensors: tensors | {"more": torch.zeros(1)}),
    *(with_tensors(partial(first_of, value=value)) for value in (NAN, INF, -INF, 3e38, -1e30)),
]


def older(number, message, earlier):
    """Return the reply of an earlier round."""
    return earlier[-number].answer


def old_work(message, earlier):
    """Return the work of an earlier round under the header of this one's."""
    old = earlier[-1].answer
    return Parcel(message.answer.header | {"visits": old.header["visits"]}, old.payloads | {"again": b""})


REPLAYS = [partial(older, 1), partial(older, 2), old_work]
FAILED = Refused("the node has failed:\n\ud800" + "x" * 5000)
ALL = [*HEADERS, *FIELDS, *VISITS, *PAYLOADS, lambda message: None, lambda message: FAILED]


def positions(change):
    def changed(tensors):
        found = {name: each.clone() for name, each in tensors.items()}
        change(found["0.positions"])
        return found

    return with_tensors(changed)


CODED = [
    positions(lambda p: p.__setitem__(0, -1)),
    positions(lambda p: p.__setitem__(0, 2**30)),
    positions(lambda p: p.__setitem__(1, int(p[0]))),
    positions(lambda p: p.copy_(p.flip(0))),
    positions(lambda p: p.fill_(0)),
    positions(lambda p: p.__setitem__(-1, -(2**31))),
    with_tensors(partial(first_of, value=NAN)),
    with_tensors(partial(first_of, value=INF)),
    with_tensors(lambda tensors: tensors | {"1.exponents": tensors["1.exponents"] * 0 + 32767}),
    with_tensors(turned),
    with_tensors(renamed),
    with_tensors(lambda tensors: {n: v for n, v in tensors.items() if n != "0.positions"}),
    with_payload(lambda data: data[:-2]),
    with_payload(lambda data: b"\0" * len(data)),
]


class Rounds(Callback):
    """Digest of the model after each round, and the logged counts of it."""

    def __init__(self):
        self.found = []

    def on_train_epoch_end(self, trainer, pl_module):
        weights = digest({name: p.detach() for name, p in pl_module.named_parameters()})
        self.found.append((weights, float(trainer.callback_metrics["fed/dropped"])))


def run(name, folder, rounds, change):
    """Return what each round has left, the rows of the hostile client, and the loop."""
    real = make_node(name, folder / "node")
    seen, rows, earlier = Rounds(), [], []

    def changed(message):
        if message.node != 2 or message.asked.header["action"] != "visit":
            return message.answer
        found = change(len(earlier), message, earlier)
        earlier.append(message)
        return found

    there = Here({1: FakeNode(name, OTHERS, real), 2: FakeNode(name, [HOSTILE], real)}, changed)

    def with_rounds(root):
        kind = ALL_KINDS[name](root)
        return Kind(**{**vars(kind), "callbacks": lambda: [seen]})

    kinds = f"{name}_watched"
    ALL_KINDS[kinds] = with_rounds
    try:
        _, loop = deploy(kinds, folder / "server", there, rounds)
    finally:
        del ALL_KINDS[kinds]
    rows = [row for row in visits_of(folder / "server") if row["client"] == HOSTILE]
    return seen.found, rows, loop


@pytest.mark.parametrize(
    ("name", "mutations"),
    [("everybody", [*ALL, *REPLAYS]), ("everybody_coded", CODED)],
    ids=["lossless", "coded"],
)
def test_hostile_replies_change_nothing_and_are_counted(tmp_path, name, mutations):
    first = 2  # rounds whose replies are taken, as earlier ones for the replays

    def hostile(place, message, earlier):
        if place < first:
            return message.answer
        mutation = mutations[place - first]
        return mutation(message, earlier) if mutation in REPLAYS else mutation(message)

    def away(place, message, earlier):
        return message.answer if place < first else Refused("away")

    number = first + len(mutations)
    found, rows, loop = run(name, tmp_path / "hostile", number, hostile)
    expected, others, _ = run(name, tmp_path / "away", number, away)
    assert len(found) == number
    taken = [
        str(mutations[i - first])
        for i in range(first, number)
        if not rows[i]["reason"].startswith("dropped: ")
    ]
    assert not taken
    assert [row["reason"] for row in rows[:first]] == ["", ""]
    assert found == expected
    assert [dropped for _, dropped in found[first:]] == [1.0] * len(mutations)
    assert {row["reason"] for row in others[first:]} == {"dropped: away"}
    assert sum(loop.nodes.refused.values()) == len(mutations)
    assert all(reason.isprintable() and len(reason) < 400 for reason in loop.nodes.refused)
    if name == "everybody":
        assert len(mutations) >= 100


HEADER_TEXTS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"7",
    b"\xff\xfe{}",
    b"\x80\x04\x95",
    b'{"format": 2}',
    b'{"format": true, "format": "1"}',
    b'{"format": 1, "x": NaN}',
    b'{"format": 1, "x": Infinity}',
    b'{"format": 1, "x": -Infinity}',
    b'{"format": 1, "x": "\\ud800"}',
    b'{"format": 1, "\\udfff": 1}',
    b'{"format": 1, "x": ' + b"9" * 5000 + b"}",
    b'{"format": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"format": 1, "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    b'{"format": 1} {"format": 1}',
    b'{"format": 1, "x": "' + b" " * Bounds().header_bytes + b'"}',
]


@pytest.mark.parametrize("text", HEADER_TEXTS, ids=range(len(HEADER_TEXTS)))
def test_a_header_that_is_no_message_is_refused(text):
    with pytest.raises(Refused):
        read_header(text)


JOINS = [
    lambda head: {k: v for k, v in head.items() if k != "clients"},
    lambda head: {k: v for k, v in head.items() if k != "base"},
    lambda head: {k: v for k, v in head.items() if k != "torch"},
    *(lambda head, clients=clients: head | {"clients": clients} for clients in (
        [], 7, {"": 1}, {"x" * 201: 1}, {"a\nb": 1}, {"\ud800": 1}, {"a": 0}, {"a": -5}, {"a": True}, {"a": 1.5},
        {"a": 2**62}, {"a": "1"}, {"c0": 5}, {f"n{i}": 1 for i in range(10_001)},
    )),
    lambda head: head | {"groups": []},
    lambda head: head | {"groups": {"c0": "x"}},
    lambda head: head | {"groups": {"b": 7}, "clients": {"b": 3}},
    lambda head: head | {"fedlight": "0"},
    lambda head: head | {"torch": ["2"]},
    lambda head: head | {"base": "other"},
    lambda head: head | {"base": None},
    lambda head: head | {"nonce": "0"},
    *(lambda head, key=key: {k: v for k, v in head.items() if k != key} for key in ("key", "signature")),
    *(lambda head, key=key: head | {key: "0" * len(head[key])} for key in ("key", "signature")),
    lambda head: head | {"key": 7},
]  # fmt: skip


def test_a_node_that_joins_with_broken_answers_does_not_take_part(tmp_path):
    real = make_node("everybody", tmp_path / "node")
    homes = {1: FakeNode("everybody", OTHERS, real)}
    homes |= {2 + i: FakeNode("everybody", ["b"], real) for i in range(len(JOINS))}

    def changed(message):
        change = JOINS[message.node - 2] if message.node > 1 else dict
        return Parcel(change(message.answer.header))

    own = {name: real.answer(_join()).header[name] for name in ("fedlight", "torch", "lightning")}
    nodes = Nodes(Here(homes, changed), "run", {"num_rounds": 1, "sizes": True, "groups": False}, own)
    nodes.welcome()
    nodes.compare_bases(real.answer(_join()).header["base"], len(OTHERS))
    assert sorted(nodes.sizes) == OTHERS
    assert not nodes.groups
    refused = [node for node, reason in nodes._known.items() if reason]
    assert len(refused) == len(JOINS)
    nodes._known = {1: "", **dict.fromkeys(range(2, 7), "late")}
    assert nodes.why_not() == ["node 2, node 3, node 4 and 2 more: late"]


def test_a_server_starts_with_no_node_that_has_another_base(tmp_path):
    real = make_node("one_client", tmp_path / "node")
    homes = {1: FakeNode("one_client", OTHERS, real), 2: FakeNode("fedavg", [HOSTILE], real)}

    change = changes.changed("join", 2, partial(changes.with_header, "base", "other"))
    _, loop = deploy("one_client", tmp_path / "server", Here(homes, change), 1)
    assert sorted(loop.clients) == OTHERS
    there = Here({2: homes[2]}, change)
    with pytest.raises(ValueError, match="no node can take part: node 2: it has another base"):
        deploy("one_client", tmp_path / "other", there, 1, min_clients=1)
    real = make_node("everybody", tmp_path / "everybody")
    homes = {number: FakeNode("everybody", named, real) for number, named in ((1, OTHERS), (2, [HOSTILE]))}
    with pytest.raises(ValueError, match="9 of 10 clients are left: node 2: it has another base"):
        deploy("everybody", tmp_path / "few", Here(homes, change), 1)


class Words:
    """Tokenizer of two words."""

    chat_template = None

    def get_vocab(self):
        return {"b": 1, "a": 0}


def scaled(model):
    model.net.base_model.model[0].scaling["default"] *= 2


def with_dropout(model):
    model.net.base_model.model[2].p = 0.5


def ranked(model):
    layer = model.net.base_model.model[0]
    layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = (
        torch.ones(3, 4),
        torch.ones(8, 3),
    )


@pytest.mark.parametrize(
    "change", [lambda model: setattr(model, "tokenizer", Words()), scaled, with_dropout, ranked]
)
def test_a_node_with_another_tokenizer_or_lora_does_not_take_part(tmp_path, change):
    homes = two_nodes("fedsa_lora_nf4", tmp_path)
    change(homes[2]._parts.model)
    _, loop = deploy("fedsa_lora_nf4", tmp_path / "server", Here(homes), 1)
    assert loop.nodes.why_not() == [f"node 2: {OTHER_BASE}"]
    assert len(loop.clients) == 5


def _join():
    return Parcel({"format": 1, "action": "join", "run": "r", "nonce": "0", "num_rounds": 1, "sizes": True})


def test_reasons_are_counted_together_when_they_are_too_many():
    nodes = Nodes(Here({}), "run")
    for number in range(MOST_REASONS + 50):
        nodes.count_refused(f"reason {number}")
    assert len(nodes.refused) == MOST_REASONS + 1
    assert nodes.refused[OTHER_REASONS] == 50
