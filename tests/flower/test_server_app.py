import json
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import refusal

pytest.importorskip("flwr", reason="needs fedlight[flower]")
from superlink_stub import MIB, SuperLink

from fedlight.flower import client_app, server_app
from fedlight.flower.messages import FORMAT, Bounds, Parcel, Refused
from fedlight.flower.records import from_record, to_record
from fedlight.flower.server_app import OverGrid, parts_of, third_field

ASKED = Parcel({"format": FORMAT, "action": "visit"}, {"p0": b"model"})
GOOD = Parcel({"format": FORMAT}, {"p0": b"good"})
DIFFERENT = np.arange(5 * MIB, dtype=">u4").tobytes()  # 20 MiB, no two chunks alike


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(server_app, "POLL_SECONDS", 0.01)


def asked(link, due=0, timeout=0.5, bounds=None):
    over, parcel, found = OverGrid(link.grid(), bounds), Parcel(ASKED.header, ASKED.payloads, due), {}
    waiting = {over.push(node, parcel, timeout): node for node in link.nodes}
    while there := over.pull(dict.fromkeys(waiting, parcel), timeout or 1.0) if waiting else {}:
        found |= {waiting.pop(name): reply for name, reply in there.items()}
    return found


def test_nodes_get_their_messages_and_answers_come_back():
    link = SuperLink([3, 5], lambda node: Parcel({"format": FORMAT, "node": node}, {"p0": DIFFERENT}))
    assert OverGrid(link.grid()).nodes() == [3, 5]
    found = asked(link, due=len(DIFFERENT))
    assert {node: one.header["node"] for node, one in found.items()} == {3: 3, 5: 5}
    assert found[3].payloads == {"p0": DIFFERENT}
    assert [one.metadata.dst_node_id for one in link.messages] == [3, 5]


@pytest.mark.parametrize(("timeout", "ttl"), [(0.05, 0.05), (None, 43_200.0)])
def test_messages_are_good_for_as_long_as_the_round(timeout, ttl):
    link = SuperLink([3], lambda node: None if timeout else GOOD)
    begun = time.time()
    asked(link, timeout=timeout)
    (message,) = link.messages
    assert message.metadata.ttl == ttl
    assert abs(message.metadata.created_at - begun) < 5


@pytest.mark.parametrize("data", [DIFFERENT, b"x" * 20 * MIB], ids=["sent", "named many times"])
def test_a_reply_that_is_larger_than_due_is_not_read_to_its_end(data):
    """A chunk of 5 MiB that an array names many times is sent once, and would be laid out in memory."""
    link = SuperLink([3, 5], lambda node: Parcel({"format": FORMAT}, {"p0": data}) if node == 3 else GOOD)
    found = asked(link)
    assert isinstance(found[3], Refused)
    assert "bytes or more, of which 0 are due: the rest is more than max-header-mib=16" in str(found[3])
    assert link.read < 16 * MIB
    assert found[5] == GOOD


def test_a_single_object_that_is_too_large_is_not_read_at_all():
    link = SuperLink([3], lambda node: Parcel({"format": FORMAT, "x": "y" * 20 * MIB}))
    (failure,) = asked(link).values()
    assert "max-header-mib=16" in str(failure)
    assert link.read < 2000
    assert isinstance(asked(link, bounds=Bounds(header_mib=21))[3], Parcel)


def test_a_reply_of_many_empty_objects_is_not_read_to_its_end():
    payloads = {f"p{i}": i.to_bytes(3, "big") for i in range(4500)}
    link = SuperLink([3], lambda node: Parcel({"format": FORMAT}, payloads))
    (failure,) = asked(link, bounds=Bounds(header_mib=1)).values()
    assert "max-header-mib=1" in str(failure)


@pytest.mark.parametrize(
    "change",
    [
        lambda kind, content: content.replace(b"arraychunk_ids", b"arraychunk_idz"),
        lambda kind, content: content[: len(content) // 2],
        lambda kind, content: b"nonsense",
        lambda kind, content: content.replace(b"Array ", b"Other "),
        lambda kind, content: content.replace(json.dumps("uint8").encode(), b"[" * 5000),
    ],
)
def test_a_reply_with_broken_objects_is_refused_and_the_others_are_read(change):
    link = SuperLink([3, 5], lambda node: Parcel({"format": FORMAT, "node": node}, {"p0": bytes([node])}))
    before = link.reply

    def broken(message):
        known = {*link.objects}
        before(message)
        for name in {*link.objects} - known if message.metadata.dst_node_id == 3 else ():
            if link.objects[name].startswith(b"Array "):
                link.objects[name] = change("Array", link.objects[name])

    link.reply = broken
    found = asked(link)
    assert str(found[3]).startswith("refused: Flower cannot read it (")
    assert found[5].header["node"] == 5


def test_objects_are_read_as_flower_reads_them():
    """Requests, responses and objects of a reply, by Flower's own readers."""
    objects = pytest.importorskip("flwr.supercore.inflatable.inflatable_object")
    link = SuperLink([3], lambda node: Parcel({"format": FORMAT}, {"p0": DIFFERENT, "p1": b""}))
    exchanged, pull = [], link.pull_object
    link.pull_object = lambda content: exchanged.append((content, pull(content))) or exchanged[-1][1]
    asked(link, due=len(DIFFERENT))
    for request, response in exchanged:
        content = third_field(response.SerializeToString())
        assert content == response.object_content == link.objects[third_field(request).decode()]
        kind, children, body = parts_of(content)
        assert (kind, children, len(body)) == objects.get_object_head_values_from_object_content(content)
    kinds = {parts_of(response.object_content)[0] for _, response in exchanged}
    assert kinds == {"Message", "RecordDict", "ConfigRecord", "ArrayRecord", "Array", "ArrayChunk"}
    assert third_field(type(exchanged[0][1])(object_found=True).SerializeToString()) == b""
    for broken in (b"\x1a", b"\xff", b"\x1d\x01"):
        with pytest.raises((IndexError, ValueError)):
            third_field(broken)


def test_another_client_of_flower_is_refused_with_the_remedy():
    class Other:
        _runtime_client = SimpleNamespace(_client=SimpleNamespace(hooks=[]))

    with refusal(r"replies cannot be measured over flwr [\d.]+: install flwr>=1\.41,<1\.43"):
        OverGrid(Other())


def at_node(created_at, ttl, monkeypatch):
    """Return the header of a node's answer."""
    monkeypatch.setattr(client_app, "_node", lambda *args: SimpleNamespace(answer=lambda asked: GOOD))
    monkeypatch.setattr(client_app, "Message", lambda content, reply_to: content)
    metadata = SimpleNamespace(created_at=created_at, ttl=ttl)
    message = SimpleNamespace(metadata=metadata, content=to_record(ASKED))
    context = SimpleNamespace(run_config={}, node_config={}, node_id=1)
    return from_record(client_app.answer(message, context)).header


def test_a_node_does_not_begin_with_a_message_whose_round_is_over(monkeypatch):
    now = time.time()
    assert at_node(now - 50, 60, monkeypatch) == GOOD.header
    refused = at_node(now - 100, 60, monkeypatch)["refused"]
    assert "the round of the message was over 40 s ago by this node's clock: compare it" in refused


def test_messages_are_pushed_one_by_one_and_pulled_when_they_are_there():
    link = SuperLink([3, 5], lambda node: GOOD if node == 3 else None)
    over, parcels = OverGrid(link.grid()), dict.fromkeys((3, 5), Parcel(ASKED.header, ASKED.payloads, 99))
    names = {
        over.push(node, replace(parcel, header={**parcel.header, "node": node}), 60.0): node
        for node, parcel in parcels.items()
    }
    assert len(names) == 2
    asked = {name: parcels[node] for name, node in names.items()}
    begun = time.monotonic()
    assert {names[name]: reply for name, reply in over.pull(asked, 60.0).items()} == {3: GOOD}
    assert over.pull(asked, 0.0) == {}
    assert over.pull(asked, 0.1) == {}
    assert 0.1 < time.monotonic() - begun < 30


def test_a_message_that_the_superlink_does_not_take_has_no_name(monkeypatch):
    link = SuperLink([3], lambda node: GOOD)
    over = OverGrid(link.grid())
    for given in ([], [None]):
        monkeypatch.setattr(over._grid, "push_messages", lambda messages, given=given: given)
        assert over.push(3, ASKED, None) == ""
