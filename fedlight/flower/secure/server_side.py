"""Server's part of secure aggregation: it passes letters on, adds up masked sums, and takes the masks off the total.

The steps are those of `fedlight.flower.secure.node_side`. Nodes may be lost between any two steps, as long as
`least_of` those that have given keys stay until they have sent a sum, and `masks.threshold_of` them until the end.
The loop (a `ServerLoop`) calls `visit_masked` and `validate_masked`.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from fedlight.callbacks.loop.run import NO_WORK
from fedlight.callbacks.loop.visits.round import OpenRound
from fedlight.federation.algorithm import aggregation_of
from fedlight.federation.client import Channel, State
from fedlight.flower.loops import validation
from fedlight.flower.loops.replies import Arrived, Sent, check_reply, read_reply
from fedlight.flower.loops.server_data import DROPPED
from fedlight.flower.messages import Parcel, Refused, hex_of, value_of
from fedlight.flower.nodes import JOIN_SECONDS, Nodes
from fedlight.flower.secure import masks, ring
from fedlight.flower.secure.node_side import PUBLIC, least_of, pair_mask
from fedlight.flower.secure.refusals import LEAST_NODES
from fedlight.support.words import count_noun

logger = logging.getLogger("fedlight")


def shapes_of(due: Sequence[State]) -> dict[str, tuple[int, ...]]:
    """Return names, sorted, and shapes of the tensors that each client of a round sends.

    Raises:
        ValueError: not all of them send the same, so that some sums would be of few clients.
    """
    shapes = [{name: tuple(state[name].shape) for name in sorted(state)} for state in due]
    if any(each != shapes[0] for each in shapes):
        raise ValueError("secure-aggregation: the clients of a round send unlike tensors; set it to false")
    return shapes[0] if shapes else {}


def masked_bytes(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the bytes of a masked sum of tensors of these shapes, with that of the weights."""
    return ring.BYTES * (1 + sum(math.prod(shape) for shape in shapes.values()))


def read_masked(
    answer: Parcel, sent: Mapping[str, Sent], shapes: Mapping[str, Sequence[int]], channel: Channel
) -> tuple[dict[str, Arrived], dict[str, str], ring.Ring]:
    """Return the work of a node's clients without movements, why others of them have not taken part, and the masked sum.

    The bytes of the sum are recorded with the node's first client.

    Raises:
        Refused: something is not as due.
    """
    data, due = answer.payloads.get(ring.PAYLOAD), masked_bytes(shapes)
    if data is None or len(answer.payloads) != 1 or len(data) != due:
        raise Refused(f"its masked sum is not {due // ring.BYTES:,} elements of {ring.BYTES} bytes")
    visits = Parcel(answer.header)  # without the payload, which belongs to no visit
    lost = check_reply(visits, sent)
    there = {name: each for name, each in sent.items() if name not in lost}
    arrived = {name: read_reply(visits, each, channel, {}, masked=True) for name, each in there.items()}
    for place, work in enumerate(arrived.values()):
        work.bytes_up = [0] * len(work.works)
        work.bytes_up[-1] = 0 if place else len(data)
    return arrived, lost, ring.from_bytes(data)


class SecureRound:
    """One round of secure aggregation; ``reasons`` has for a node why it gives nothing to the round."""

    def __init__(self, nodes: Nodes, round_idx: int) -> None:
        self._nodes, self._round = nodes, round_idx
        self.reasons: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._public: dict[str, dict[str, bytes]] = {}
        self._letters: dict[str, dict[str, str]] = {}
        self._masked: dict[int, ring.Ring] = {}
        self._with_update = 0

    def open(self, parcels: Mapping[int, Parcel]) -> dict[int, Parcel]:
        """Have the nodes exchange keys and shares; return the messages of the visits of those that stay, with letters.

        None of them stays where they are too few.
        """
        keys = self._ask("keys", {node: {} for node in parcels}, lambda answer, node: _public(answer.header))
        if len(keys) < LEAST_NODES:
            return self._too_few(parcels, len(keys), LEAST_NODES)
        self._names = {node: str(place + 1) for place, node in enumerate(sorted(keys))}
        self._public = {self._names[node]: public for node, public in keys.items()}
        listed = {
            name: {key: value.hex() for key, value in public.items()} for name, public in self._public.items()
        }
        written = self._ask("shares", {node: {"nodes": listed} for node in keys}, self._letters_of)
        least = least_of(len(keys))
        if len(written) < least:
            return self._too_few(parcels, len(written), least)
        self._letters = {self._names[node]: letters for node, letters in written.items()}
        opened = {}
        for node in written:
            receiver = self._names[node]
            letters = {name: each[receiver] for name, each in self._letters.items() if name != receiver}
            opened[node] = replace(parcels[node], header={**parcels[node].header, "letters": letters})
        return opened

    def add(self, node: int, masked: ring.Ring, updates: int) -> None:
        """Take the masked sum of a node, of so many updates: none where all of its clients have diverged."""
        self._masked[node] = masked
        self._with_update += updates > 0

    def total(self) -> ring.Ring:
        """Return the sum of all nodes that have sent one, without masks.

        Raises:
            Refused: too few nodes have, or their shares do not open the masks.
        """
        threshold = masks.threshold_of(len(self._public))
        names = {self._names[node]: node for node in self._masked}
        gone = [name for name in self._letters if name not in names]
        self._refuse_too_few("have sent a sum", len(names), least_of(len(self._public)))
        # A sum of zeros hides no other sum.
        self._refuse_too_few("have results", self._with_update, LEAST_NODES)
        lists = {"alive": [*names], "gone": gone}
        take = partial(self._shares_of, alive=[*names], gone=gone)
        answers = self._ask("unmask", dict.fromkeys(self._masked, lists), take)
        self._refuse_too_few("have helped to unmask the sum", len(answers), threshold)
        elements = next(iter(self._masked.values())).shape[1]
        total = ring.zeros(elements)  # the masks between two nodes that are both in it cancel
        for masked in self._masked.values():
            ring.add(total, masked)
        for name in names:
            shares = [answer["seeds"][name] for answer in answers.values()]
            seed = _joined(shares, threshold, masks.commitment, self._public[name]["seed"])
            ring.add(total, ring.negative(masks.stream(seed, elements)))
        for name in gone:
            shares = [answer["masks"][name] for answer in answers.values()]
            private = _joined(shares, threshold, masks.public_key, self._public[name]["mask"])
            for other in names:  # the total still lacks the mask of the lost node
                public = self._public[other]["mask"]
                ring.add(total, pair_mask(private, public, int(name), int(other), elements))
        return total

    def _ask(self, action: str, fields: Mapping[int, dict[str, Any]], take: Any) -> dict[int, Any]:
        """Ask nodes for a step; return what ``take`` finds in their answers, and keep the reasons of the others."""
        parcels = {node: Parcel({"round": self._round, **values}) for node, values in fields.items()}
        taken, reasons = self._nodes.collect(
            action, parcels, take, {node: node for node in fields}, JOIN_SECONDS
        )
        self.reasons |= reasons
        return taken

    def _letters_of(self, answer: Parcel, node: int) -> dict[str, str]:
        given = value_of(answer.header, "letters", dict)
        if given.keys() != self._public.keys() - {self._names[node]}:
            raise Refused("its letters are not one to each other node")
        return {name: hex_of(given, name, masks.LETTER_BYTES).hex() for name in given}

    def _shares_of(
        self, answer: Parcel, node: int, alive: Sequence[str], gone: Sequence[str]
    ) -> dict[str, dict[str, bytes]]:
        shares = {}
        for key, due in (("seeds", alive), ("masks", gone)):
            given = value_of(answer.header, key, dict)
            if given.keys() != {*due}:
                raise Refused("its shares are not one of each node")
            shares[key] = {name: hex_of(given, name, masks.SHARE_BYTES) for name in due}
            holder = int(self._names[node]).to_bytes(masks.HOLDER_BYTES, "little")
            if any(share[: masks.HOLDER_BYTES] != holder for share in shares[key].values()):
                raise Refused("its shares are not its own")  # one share twice cannot be combined
        return shares

    def _too_few(self, parcels: Mapping[int, Parcel], number: int, least: int) -> dict[int, Parcel]:
        try:
            self._refuse_too_few("are there", number, least)
        except Refused as error:
            self.reasons = {node: self.reasons.get(node, str(error)) for node in parcels}
            logger.warning("round %s: %s", self._round + 1, error)
        return {}

    def _refuse_too_few(self, what: str, number: int, least: int) -> None:
        if number < least:
            raise Refused(f"{count_noun(number, 'node')} {what}, and a secure sum takes {least}")


def decoded(
    total: ring.Ring, shapes: Mapping[str, Sequence[int]], weights: Sequence[float]
) -> dict[str, Any]:
    """Return the total as the partial of a `WeightedSum`, once its sum of these ``weights`` shows that the masks are off.

    Raises:
        Refused: the sum of weights is another one, or a value is too large for so many clients.
    """
    partial_sum = ring.decode(total, shapes)
    expected = sum(map(Fraction, weights), Fraction())
    if sum((Fraction(*ratio) for _, ratio in partial_sum["divisors"]), Fraction()) != expected:
        raise Refused(
            "the sum of the nodes is not that of the clients that have taken part: a node has sent another one"
        )
    most = ring.MOST_OF_LAST * max(1, len(weights))  # no node can send more, unless it breaks the rules
    if np.abs(ring.highest(total)).max() > most:
        raise Refused("the sum of the nodes holds values that are no weights of a model")
    return partial_sum


def _public(header: Mapping[str, Any]) -> dict[str, bytes]:
    public = {key: hex_of(header, key, masks.KEY_BYTES) for key in PUBLIC}
    for key in ("mask", "letter"):  # the other nodes would refuse to go on with one that is none
        masks.agreed_key(masks.new_secret(), public[key], "check")
    return public


def _joined(shares: Sequence[bytes], threshold: int, to_known: Any, known: bytes) -> bytes:
    """Return the secret behind shares that may include wrong ones: its public counterpart is known.

    Raises:
        Refused: it cannot be found.
    """
    for first in range(len(shares)):  # not all subsets: with many nodes there are too many
        some = [*islice([*shares, *shares], first, first + threshold)]
        try:
            if to_known(secret := masks.join(some)) == known:
                return secret
        except (Refused, ValueError):  # of another length, as wrong shares may give
            continue
    raise Refused("the shares of the nodes do not open the sum: a node has sent wrong ones")


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
