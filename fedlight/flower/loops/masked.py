"""Secure aggregation in the loop of a server (a `ServerLoop`): rounds and validations whose nodes send masked sums."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fedlight.callbacks.loop.run import NO_WORK
from fedlight.callbacks.loop.visits.round import OpenRound
from fedlight.federation.algorithm import aggregation_of
from fedlight.flower.loops import validation
from fedlight.flower.loops.replies import Arrived, Sent
from fedlight.flower.loops.server_data import DROPPED
from fedlight.flower.messages import Parcel, Refused
from fedlight.flower.secure.refusals import LEAST_NODES
from fedlight.flower.secure.server_side import SecureRound, decoded, masked_bytes, read_masked, shapes_of

logger = logging.getLogger("fedlight")


def visit_masked(
    loop: Any, under_way: OpenRound, homes: Mapping[int, Mapping[str, Sent]], parcels: Mapping[int, Parcel]
) -> dict[str, Arrived | str]:
    """Have nodes make the visits and mask their replies; add their sum to the round.

    Who is in the sum, or why not, is returned. A node is in it with all of its clients or with none.
    """
    secure_round = SecureRound(loop.nodes, loop.rounds_done)
    weights = {name: _weight(loop, each) for home in homes.values() for name, each in home.items()}
    shapes = shapes_of([each.due[0].up for home in homes.values() for each in home.values()])
    before = replace(loop.nodes.traffic)
    due = masked_bytes(shapes)
    opened = secure_round.open({node: replace(each, due_bytes=due) for node, each in parcels.items()})
    arrived: dict[str, Arrived] = {}
    lost: dict[str, str] = {}
    take = partial(read_masked, shapes=shapes, channel=loop.channel)
    taken, refused = loop.nodes.collect("visit", opened, take, homes)
    secure_round.reasons |= refused
    for node, (works, reasons, masked) in taken.items():
        arrived |= works
        lost |= {name: f"{DROPPED}: {reason}" for name, reason in reasons.items()}
        secure_round.add(node, masked, sum(not work.diverged for work in works.values()))
    reason = "too few nodes are left for a secure sum"
    try:
        if arrived:
            added = [weights[name] for name, work in arrived.items() if not work.diverged]
            total = decoded(secure_round.total(), shapes, added)
            under_way.contributions.merge([{"updates": total, "diverged": {}}])
    except Refused as error:  # without the total no update is known, only who diverged
        loop.nodes.count_refused(str(error))
        logger.warning("round %s: %s", loop.rounds_done + 1, error)
        arrived, reason = {name: work for name, work in arrived.items() if work.diverged}, str(error)
    visits = sum(parcel.num_bytes for parcel in opened.values())
    loop._run.log({"secure_bytes_down": float(loop.nodes.traffic.down - before.down - visits)})
    loop._run.log({"secure_bytes_up": float(loop.nodes.traffic.up - before.up)})
    outcomes: dict[str, Arrived | str] = {}
    for node, home in homes.items():
        outcomes |= dict.fromkeys(home, f"{DROPPED}: {secure_round.reasons.get(node, reason)}")
    return outcomes | lost | arrived


def validate_masked(
    loop: Any, homes: Mapping[int, Sequence[str]], parcels: Mapping[int, Parcel]
) -> tuple[dict[str, float], int]:
    """Have nodes validate and mask their sums; return the mean over clients, and the number of these."""
    secure_round = SecureRound(loop.nodes, loop.rounds_done - 1)
    due = masked_bytes(validation.OF_VOTES)
    opened = secure_round.open({node: replace(each, due_bytes=due) for node, each in parcels.items()})
    answers = loop.collect("validate", opened, validation.read_masked_votes, homes)
    clients: list[str] = []
    for node, (names, masked) in answers.items():
        secure_round.add(node, masked, len(names))
        clients += names
    with_rows = sum(bool(names) for names, _ in answers.values())
    everybody = len(answers) == len(homes) and sum(map(len, homes.values())) == len(loop.clients)
    if everybody and with_rows < LEAST_NODES:
        loop.judge = None  # no later round would have a sum either
        logger.warning(
            "secure-aggregation: %s of %s nodes have validation rows, too few for a sum, so nodes are asked no more: "
            "give rows to %s nodes at least, or leave ClientAccuracy out",
            *(with_rows, len(homes), LEAST_NODES),
        )
    if not clients or loop.judge is None:
        return {}, 0
    try:
        total = decoded(secure_round.total(), validation.OF_VOTES, [1.0] * len(clients))
        return {"val/client_mean": validation.mean_vote(total)}, len(clients)
    except Refused as error:
        loop.nodes.count_refused(str(error))
        logger.warning("round %s: no validation: %s", loop.rounds_done, error)
        return {}, 0


def _weight(loop: Any, sent: Sent) -> float:
    """Return the weight of a client's update, from numbers that the server knows."""
    # With algorithms that are summed it follows from numbers of examples, so the movement may be unknown.
    update = loop.algorithm.finish_visit(sent.visitings[-1], {}, NO_WORK)
    uniform = getattr(loop.aggregation or aggregation_of(loop.algorithm, 1), "divide_by", "") != "weight"
    return 1.0 if update is None or uniform else update.weight
