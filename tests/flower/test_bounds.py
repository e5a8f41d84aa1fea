"""Bounds on a node's replies: tensors by names and shapes, all else by settings."""

import re

import pytest
from changed_messages import with_visit
from nodes_here import Here, Message, deploy, two_nodes, visits_of

from fedlight.flower.messages import Bounds, Parcel
from fedlight.flower.settings import bounds_of, node_settings, number_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about rounds of a few batches


def second(change):
    """Return a function that changes the second node's answers to visits from the second round on."""

    def changed(message: Message):
        head, answer = message.asked.header, message.answer
        return change(answer) if message.node == 2 and head.get("round") and "visits" in head else answer

    return changed


def metrics(number, length=1):
    return lambda answer: with_visit("training", {f"m{i:0{length}}": [1.0, 1] for i in range(number)}, answer)


@pytest.mark.parametrize(
    ("change", "bounds", "reason"),
    [
        (metrics(101), Bounds(), "it has 101 training metrics, more than max-metrics=100 in the app's"),
        (metrics(80_000), Bounds(header_mib=1), "max-header-mib=1 in the app's settings"),
        (
            metrics(200_000, length=90),  # 20 MiB, more than without the setting
            Bounds(header_mib=64),
            "it has 200,000 training metrics, more than max-metrics=100",
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
@pytest.mark.parametrize("value", [0, -1, 1.5, "ten", True])
def test_a_bound_that_is_no_number_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=rf"has {name}={value!r}: set it to a whole number"):
        bounds_of({name: value})


@pytest.mark.parametrize("value", [-1, float("nan"), "ten", None, True])
def test_another_number_of_the_app_is_refused_by_its_name(value):
    assert number_of({"wait-seconds": "1.5"}, "wait-seconds", 600) == 1.5
    with pytest.raises(ValueError, match=f"has wait-seconds={value!r}: set it to a number of at least 0"):
        number_of({"wait-seconds": value}, "wait-seconds", 600)
    for fraction in (1.5, float("inf")):
        with pytest.raises(ValueError, match="set it to a whole number"):
            number_of({"min-clients": fraction}, "min-clients", 0, whole=True)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(2, "from 0 to 1"), *((n, "set it to a whole number") for n in (-1, 1.5, "b", None))],
)
def test_a_node_beyond_their_number_is_refused(number, remedy):
    with pytest.raises(ValueError, match=f"has partition-id={number!r}.*{remedy}"):
        node_settings({"partition-id": number, "num-partitions": 2}, 7)


@pytest.mark.parametrize(("clients", "names"), [(0, ["0"]), ("a, b", ["a", "b"]), ("", [""])])
def test_a_node_serves_the_clients_that_it_is_given(clients, names):
    """The id 0 is not all clients; the empty one is refused, as no row has it."""
    assert node_settings({"clients": clients}, 7)[2] == names


def test_of_the_federation_a_node_has_only_its_steps_of_its_own():
    for steps in ({"federated.local_steps": 3}, {"federated.init_args.local_steps": 3}):
        assert node_settings(steps, 7)[0] == steps
    for name in ("federated.algorithm", "federated.init_args.algorithm.init_args.local_steps"):
        with pytest.raises(ValueError, match=rf"has {re.escape(name)}: .*in the app's config"):
            node_settings({"data.init_args.source": "a.jsonl", name: 3}, 7)
