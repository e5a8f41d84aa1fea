"""Bounds on a node's replies: tensors by names and shapes, all else by settings."""

import pytest
from nodes_here import ALL_KINDS, Here, Message, deploy, make_node, two_nodes, visits_of

from fedlight.flower.messages import Bounds, Parcel
from fedlight.flower.settings import bounds_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about rounds of a few batches


def sent_and_due(messages):
    """Return bytes of the payloads of each reply to a visit, and those that were due."""
    return [(sum(map(len, one.answer.payloads.values())), one.asked.due_bytes) for one in messages]


@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "int8", "scaffold_top_k", "fedsa_lora_nf4", "fewfedpit"]
)
def test_what_is_due_is_what_an_honest_node_sends(tmp_path, name):
    there = Here(two_nodes(name, tmp_path))
    deploy(name, tmp_path / "server", there, min(2, ALL_KINDS[name](tmp_path).rounds))
    found = sent_and_due(there.of("visit"))
    assert found
    assert all(sent == due > 0 for sent, due in found)
    assert {one.asked.due_bytes for one in there.messages if one.asked.header["action"] != "visit"} == (
        {0} if found else set()
    )


def test_a_client_that_has_pruned_itself_sends_no_more_than_is_due(tmp_path):
    there = Here(two_nodes("hetlora_pruning", tmp_path))
    deploy("hetlora_pruning", tmp_path / "server", there, 3)
    assert all(0 < sent <= due for sent, due in sent_and_due(there.of("visit")))


def test_a_masked_sum_is_due_once_for_a_node(tmp_path):
    homes = {n: make_node("all_uniform", tmp_path / f"node{n}", (n - 1, 3), secure=True) for n in (1, 2, 3)}
    there = Here(homes)
    deploy("all_uniform", tmp_path / "server", there, 1, secure=True)
    found = sent_and_due(there.of("visit"))
    assert len(found) == 3
    assert all(sent == due for sent, due in found)


def second(change):
    """Return a function that changes the second node's answers to visits from the second round on."""

    def changed(message: Message):
        head = message.asked.header
        return (
            change(message.answer)
            if message.node == 2 and head.get("round") and "visits" in head
            else message.answer
        )

    return changed


def metrics(number, length=1):
    def change(answer):
        first, *others = answer.header["visits"]
        many = {f"m{i:0{length}}": [1.0, 1] for i in range(number)}
        return Parcel(answer.header | {"visits": [first | {"training": many}, *others]}, answer.payloads)

    return change


@pytest.mark.parametrize(
    ("change", "bounds", "reason"),
    [
        (
            metrics(101),
            Bounds(),
            "a visit has 101 training metrics, more than max-metrics=100 in the app's settings",
        ),
        (metrics(80_000), Bounds(header_mib=1), "max-header-mib=1 in the app's settings"),
        (
            metrics(200_000, length=90),  # 20 MiB, more than without the setting
            Bounds(header_mib=64),
            "a visit has 200,000 training metrics, more than max-metrics=100",
        ),
        (
            lambda answer: Parcel(answer.header, answer.payloads | {"more": bytes(2**20)}),
            Bounds(header_mib=1),
            "max-header-mib=1 in the app's settings",
        ),
    ],
    ids=["metrics", "very many", "a long header", "payload"],
)
def test_a_reply_with_too_much_is_dropped_with_the_setting(tmp_path, change, bounds, reason):
    there = Here(two_nodes("fedavg", tmp_path), second(change))
    _, loop = deploy("fedavg", tmp_path / "server", there, 3, bounds=bounds)
    asked = {client for one in there.of("visit") if one.node == 2 for client in one.asked.header["shares"]}
    rows = visits_of(tmp_path / "server")
    dropped = [row for row in rows if row["reason"]]
    assert dropped
    assert all(reason in row["reason"] for row in dropped)
    assert {row["client"] for row in dropped} <= asked
    assert {row["round"] for row in dropped} == {"1", "2"}
    assert loop.rounds_done == 3


def test_as_many_metrics_as_the_setting_allows_are_taken(tmp_path):
    there = Here(two_nodes("fedavg", tmp_path), second(metrics(101)))
    deploy("fedavg", tmp_path / "server", there, 2, bounds=Bounds(metrics=101))
    assert {row["reason"] for row in visits_of(tmp_path / "server")} == {""}


@pytest.mark.parametrize("name", ["max-clients", "max-metrics", "max-header-mib"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "10", True])
def test_a_bound_that_is_no_number_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=rf"has {name}={value!r}: set it to a whole number"):
        bounds_of({name: value})
