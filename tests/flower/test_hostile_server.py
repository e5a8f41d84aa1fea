import json
from functools import partial

import pytest
from changed_messages import odd_values, with_header, with_payload, with_visit, without_header
from nodes_here import Here, deploy, make_node, two_nodes

from fedlight.flower.messages import Parcel, Refused

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about rounds of a few batches

NAN, INF = float("nan"), float("inf")
DEEP = json.loads("[" * 400 + "]" * 400)
ODD = [None, True, -1, 2**70, 0.5, NAN, "", "x" * 300, [], [7], {}, {"x": 1}, DEEP]
FITTING = dict.fromkeys(("action", "round", "shares", "visits"), ()) | {
    "run": ["", "x" * 300],
    "num_rounds": [-1],
    "model": [None],
    "rates": [None],
    "memories": [{}],
    "algorithm": [{}, {"x": 1}],
}
"""Field of a message -> those of the odd values that it may have."""


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A message of the second round to one of two nodes, and the node that has not answered it yet."""
    folder = tmp_path_factory.mktemp("asked")
    there = Here(two_nodes("scaffold", folder))
    deploy("scaffold", folder / "server", there, 3)
    node = make_node("scaffold", folder / "node1", (0, 2))
    [last] = [one for one in there.of("visit") if one.node == 1 and one.asked.header["round"] == 2]
    return node, last


def rates(change, asked):
    found = json.loads(json.dumps(asked.header["rates"]))
    return with_header("rates", change(found), asked)


def of_group(name, value, found):
    found["groups"][0][0][name] = value
    return found


MUTATIONS = [
    *(partial(without_header, name) for name in ("action", "run", "round", "num_rounds", "shares", "visits")),
    *(partial(with_header, *pair) for pair in odd_values(FITTING, ODD)),
    *(partial(with_visit, *pair) for pair in odd_values({"client": (), "label": (), "payload": [None]}, ODD)),
    *(partial(with_header, "shares", {name: 0.1}) for name in ("nobody", "../../etc", "\0")),
    *(partial(with_header, "memories", {"c0": value}) for value in ([1], [1, 2, 3], ["1", 2], [True, 1], 7)),
    partial(with_header, "round", 10**9),
    partial(with_header, "num_rounds", 1),
    *(partial(with_payload, lambda data, size=size: data[:size]) for size in (0, 8, 40, -1)),
    partial(with_payload, lambda data: data + b"x"),
    partial(with_payload, lambda data: b"\xff" * len(data)),
    partial(with_payload, lambda data: b"\0" * len(data)),
    lambda asked: Parcel(asked.header, {}),
    partial(rates, lambda found: {"groups": found["groups"]}),
    partial(rates, lambda found: {"groups": [], "schedules": []}),
    partial(rates, lambda found: {"groups": [[]], "schedules": []}),
    partial(rates, lambda found: {"groups": [[{}]], "schedules": []}),
    partial(rates, lambda found: {"groups": found["groups"], "schedules": [{}]}),
    *(partial(rates, partial(of_group, "lr", value)) for value in ("1", None, [], {})),
]


@pytest.mark.parametrize("place", range(len(MUTATIONS)))
def test_a_node_refuses_a_broken_message(asked, place):
    node, message = asked
    with pytest.raises(Refused):
        node.answer(MUTATIONS[place](message.asked))


def test_a_node_that_was_asked_broken_things_answers_as_before(asked):
    node, message = asked
    for mutation in MUTATIONS[::5]:
        with pytest.raises(Refused):
            node.answer(mutation(message.asked))
    answer = node.answer(message.asked)
    assert answer.payloads == message.answer.payloads
    assert answer.header["nonce"] == message.answer.header["nonce"]
    assert len(MUTATIONS) >= 100


def test_rates_reach_no_other_attribute_of_an_optimizer(asked):
    node, message = asked
    more = rates(partial(of_group, "params", []), message.asked)
    assert node.answer(more).payloads == message.answer.payloads
