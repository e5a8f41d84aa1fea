"""Nodes as the server knows them: the clients of each, and the requests to them over a transport."""

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from fedlight.flower.identity import verified
from fedlight.flower.messages import FORMAT, Bounds, Parcel, Refused, value_of
from fedlight.support.words import count_noun

MOST_ID = 200
"""Longest id of a client, in characters."""
MOST_REASONS, OTHER_REASONS = 1000, "other reasons"
"""Most reasons of refusals that are counted apart."""
JOIN_SECONDS = 600.0
"""Wall time after which a node that is asked to join, or for a step of secure aggregation, counts as away."""
MOST_EXAMPLES = 10**9
"""Most examples of one client."""
OTHER_BASE = (
    "it has another base than the server: frozen weights, shapes and scales of what is trained, dropout and the tokenizer "
    "have to be the same on both, so give both the same model and number type (dtype; auto is another one on a GPU)"
)
"""Reason of a node that would train another model."""
NO_ANSWER = "no answer in time, or the node is gone"
"""Reason of a client whose node is silent."""
T = TypeVar("T")
logger = logging.getLogger("fedlight")


def shown(text: str) -> str:
    """Return a text of a node in one line of at most 300 characters that can be printed and written.

    Examples:
        >>> shown("a" + chr(10) + "b")
        'a b'
    """
    line = " ".join(text[:1000].split())  # cut first: the text may have megabytes
    return line.encode("ascii", "backslashreplace").decode()[:300]


class Transport(Protocol):
    """Way to the nodes."""

    def nodes(self) -> list[int]:
        """Return the nodes that are there."""

    def push(self, node: int, parcel: Parcel, timeout: float | None) -> str:
        """Send a node a parcel that is good for ``timeout`` seconds; return the message's name, empty if it is not taken."""

    def pull(self, asked: Mapping[str, Parcel], seconds: float) -> dict[str, Parcel | Refused]:
        """Wait at most ``seconds`` for an answer to one of these messages, by name; return those that are there.

        A node that has not answered as asked has `Refused` with the reason for an answer.
        """


@dataclass(frozen=True)
class Letter:
    """Message under way: its header without the payloads, which are large, and when waiting ends, on the monotonic clock.

    Its name is the transport's, empty if it was not taken.
    """

    parcel: Parcel
    name: str
    end: float


@dataclass
class Traffic:
    """Bytes of all messages of a round, headers included."""

    down: int = 0
    up: int = 0


@dataclass
class Nodes:
    """Nodes of a deployment.

    Args:
        transport: way to them.
        run: name of the run; nodes keep its clients' memories apart from those of others.
        asks: fields of the message that asks a node to join.
        versions: those that a node must have to take part.
        deadline_seconds: wall time after which a round goes on without those that have not answered; None: it waits.
        wait_seconds: longest wait for nodes, at the start and before a round.
        needed: nodes that a round needs.
        bounds: most that is taken of one node.

    Attributes:
        sizes: client -> number of its examples; 1 where it is not needed.
        groups: client -> known group.
        keys: client -> key of the node that serves it, the first that has named it; no other can from then on.
        traffic: bytes since the attribute was set anew.
        refused: messages that were refused, by reason.
    """

    transport: Transport
    run: str
    asks: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    deadline_seconds: float | None = None
    wait_seconds: float = 600.0
    needed: int = 1
    bounds: Bounds = field(default_factory=Bounds)
    sizes: dict[str, int] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    refused: dict[str, int] = field(default_factory=dict)
    _home: dict[str, int] = field(default_factory=dict)
    _known: dict[int, str] = field(default_factory=dict)
    _bases: dict[int, str] = field(default_factory=dict)
    _base: str | None = None

    def welcome(self) -> None:
        """Ask nodes that are new to join, and take the clients of those with the same versions."""
        new = [node for node in self.transport.nodes() if node not in self._known]
        parcels = {node: Parcel(dict(self.asks)) for node in new}
        for node, answer in self.ask("join", parcels, JOIN_SECONDS).items():
            # It is asked once: a node that is refused is started again, under another id.
            self._known[node] = ""
            try:
                if isinstance(answer, Refused):
                    raise answer
                self._take(node, answer.header)
            except Refused as error:
                self._known[node] = str(error)
                logger.warning("node %s does not take part: %s", node, error)

    def _take(self, node: int, header: Mapping[str, Any]) -> None:
        for name, value in self.versions.items():
            if header.get(name) != value:
                raise Refused(
                    f"its {name} is {header.get(name)!r:.60}, the server's {value!r:.60}: give both the same"
                )
        base = value_of(header, "base", str)
        if self._base not in (None, base):
            raise Refused(OTHER_BASE)
        key = verified(header, self.run, header["nonce"])  # the server's nonce, as ask has compared
        clients, groups = value_of(header, "clients", dict), value_of(header, "groups", dict)
        if len(clients) > self.bounds.clients:
            raise Refused(
                f"it names {count_noun(len(clients), 'client')}, more than max-clients={self.bounds.clients} in the app's "
                "settings: raise it if all of them are its own"
            )
        for client in clients:
            if not 0 < len(client) <= MOST_ID or not client.isprintable():
                raise Refused(f"it names a client {client!r:.60}, which is no id")
            if not 1 <= value_of(clients, client, int) <= MOST_EXAMPLES:
                raise Refused(f"client {client} has {clients[client]} examples")
            if (bound := self.keys.get(client, key)) != key:
                raise Refused(
                    f"client {client} belongs to the node with the key {bound[:16]}, and this one has {key[:16]}: if it is "
                    "the same node, give it the folder that it had, else give the client to one node alone"
                )
        for client, group in groups.items():
            if client not in clients or not isinstance(group, str) or len(group) > MOST_ID:
                raise Refused(f"it names a group of {client!r:.60}, which is none of its clients")
        self.sizes |= clients
        self.groups |= groups
        self.keys |= dict.fromkeys(clients, key)
        # Of a node that is back under another id of Flower's: the old one may be listed for a while.
        others = {name: home for name, home in self._home.items() if self.keys[name] != key}
        self._home = others | dict.fromkeys(clients, node)
        self._bases[node] = base
        logger.info("node %s takes part with %s", node, count_noun(len(clients), "client"))

    def compare_bases(self, base: str, needed: int) -> None:
        """Take the digest of the server's base, once the model is made; nodes that have another one do not take part.

        Raises:
            ValueError: those that have the server's have fewer clients than ``needed``.
        """
        self._base = base
        for node in [node for node, theirs in self._bases.items() if theirs != base]:
            self._known[node] = OTHER_BASE
            del self._bases[node]
            for client in [name for name, home in self._home.items() if home == node]:
                for known in (self._home, self.sizes, self.groups):
                    known.pop(client, None)
            logger.warning("node %s does not take part: %s", node, OTHER_BASE)
        if len(self.sizes) < needed and (reasons := self.why_not()):
            left = (
                f"{len(self.sizes)} of {needed} clients are left" if self._bases else "no node can take part"
            )
            raise ValueError(f"{left}: {'; '.join(reasons)}")

    def homes(self, clients: Sequence[str]) -> dict[int, list[str]]:
        """Return node -> those of the clients that it serves; clients whose node is not there are left out."""
        there = {*self.transport.nodes()}
        homes: dict[int, list[str]] = {}
        for client in clients:
            if (node := self._home.get(client)) in there and node is not None:
                homes.setdefault(node, []).append(client)
        return homes

    def why_not(self) -> list[str]:
        """Return why nodes do not take part, each reason once."""
        by_reason: dict[str, list[str]] = {}
        for node, reason in self._known.items():
            by_reason.setdefault(reason, []).append(f"node {node}")
        by_reason.pop("", None)  # they take part
        return [
            f"{', '.join(nodes[:3])}{f' and {len(nodes) - 3} more' if nodes[3:] else ''}: {reason}"
            for reason, nodes in by_reason.items()
        ]

    def ask(
        self, action: str, parcels: Mapping[int, Parcel], timeout: float | None = None
    ) -> dict[int, Parcel | Refused]:
        """Send each node its parcel, and return its answer, which is one to this very message, or why there is none."""
        letters = {node: self.send(action, node, parcel, timeout) for node, parcel in parcels.items()}
        ended: dict[int, Parcel | Refused] = {}
        while waiting := {node: letter for node, letter in letters.items() if node not in ended}:
            ended |= self.answers(waiting)
        return {node: ended[node] for node in letters}

    def send(self, action: str, node: int, parcel: Parcel, timeout: float | None = None) -> Letter:
        """Send a node its parcel, and go on; `answers` has what comes back."""
        parcel, seconds = self._headed(action, parcel), timeout or self.deadline_seconds
        end = time.monotonic() + (math.inf if seconds is None else seconds)
        return Letter(replace(parcel, payloads={}), self.transport.push(node, parcel, seconds), end)

    def answers(self, letters: Mapping[T, Letter], wait: bool = True) -> dict[T, Parcel | Refused]:
        """Return the answers to letters, by their keys, that are there, and why others do not come any more.

        Without any of the two it may ``wait`` for the first one.
        """
        ended: dict[T, Parcel | Refused] = {}
        while letters and not ended:
            asked = {letter.name: letter.parcel for letter in letters.values() if letter.name}
            left = min(letter.end if letter.name else 0.0 for letter in letters.values()) - time.monotonic()
            there = self.transport.pull(asked, max(0.0, left) if wait else 0.0)
            for key, letter in letters.items():
                if letter.name in there:
                    ended[key] = self._checked(there[letter.name], letter.parcel)
                elif not letter.name or letter.end <= time.monotonic():
                    ended[key] = self._checked(Refused(NO_ANSWER), letter.parcel)
            if not wait:
                break
        return ended

    def _headed(self, action: str, parcel: Parcel) -> Parcel:
        """Return a parcel with the fields that all messages have, and count its bytes."""
        head = {"format": FORMAT, "action": action, "run": self.run, "nonce": secrets.token_hex(16)}
        headed = replace(parcel, header={**head, **parcel.header})
        self.traffic.down += headed.num_bytes
        return headed

    def _checked(self, answer: Parcel | Refused, asked: Parcel) -> Parcel | Refused:
        """Count an answer's bytes, and return it if it is one to this very message; else why there is none, counted."""
        try:
            if isinstance(answer, Refused):
                raise Refused(shown(str(answer)))  # a node's text, which is printed and written
            num_bytes = answer.num_bytes
            self.traffic.up += num_bytes
            self.bounds.refuse_larger(num_bytes, asked.due_bytes)
            # A late answer to an earlier message is another one.
            for name in ("action", "run", "nonce", "round"):
                if answer.header.get(name) != asked.header.get(name):
                    raise Refused(f"its {name} is not that of what was asked")
            return answer
        except Refused as error:
            refused = error if isinstance(answer, Refused) else Refused(f"refused: {error}")
        except (ValueError, RecursionError):  # of a transport that does not read headers
            refused = Refused("refused: its header is no message")
        self.count_refused(str(refused))
        return refused

    def collect(
        self,
        action: str,
        parcels: Mapping[int, Parcel],
        take: Callable[[Parcel, Any], T],
        asked: Mapping[int, Any],
        timeout: float | None = None,
    ) -> tuple[dict[int, T], dict[int, str]]:
        """Ask nodes; return node -> result of ``take`` for its answer and its value of ``asked``, and -> reason for none."""
        taken, reasons = dict[int, T](), dict[int, str]()
        for node, answer in self.ask(action, parcels, timeout).items():
            try:
                taken[node] = self.read(answer, take, asked[node])
            except Refused as error:
                reasons[node] = str(error)
        return taken, reasons

    def read(self, answer: Parcel | Refused, take: Callable[..., T], *asked: Any) -> T:
        """Return what ``take`` finds in an answer; raise Refused, and count it, where it is not as it was due."""
        if isinstance(answer, Refused):  # counted by ask
            raise answer
        try:
            return take(answer, *asked)
        except Refused as error:
            self.count_refused(str(error))
            raise

    def count_refused(self, reason: str) -> None:
        """Count a message that was refused, or has not come."""
        if reason not in self.refused and len(self.refused) >= MOST_REASONS:  # nodes make them up
            reason = OTHER_REASONS
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def wait_for(self, clients: int) -> None:
        """Wait until there are so many clients, at as many nodes as a round needs.

        Raises:
            TimeoutError: they are not there within ``wait_seconds``.
        """

        def missing() -> str:
            here = len({*self._home.values()})
            there = f"{len(self.sizes)} of {clients} clients are there"
            if here < self.needed > 1:
                return f"{there}, at {here} of the {self.needed} nodes that a secure sum needs"
            return there if len(self.sizes) < clients else ""

        if there := self._await(missing):
            reasons = "; ".join(self.why_not()) or "no further node has come"
            raise TimeoutError(
                f"{there} after {self.wait_seconds:g} s ({reasons}): start more nodes, or raise wait-seconds, or lower a "
                "min-clients that you have set, in the app's settings"
            )

    def wait_until_back(self) -> None:
        """Take new nodes, and wait at most ``wait_seconds`` until a round has the nodes that it needs.

        Without the wait an outage of a minute would be many rounds without a client.
        """

        def missing() -> str:
            there = len(self.homes([*self._home]))
            return f"{there} of {self.needed} that a round needs" if there < self.needed else ""

        self._await(missing)

    def _await(self, missing: Callable[[], str]) -> str:
        """Take new nodes until nothing is missing, or time is over; return what is still missing."""
        end, said = time.monotonic() + self.wait_seconds, False
        while True:
            self.welcome()
            if not (lack := missing()) or time.monotonic() >= end:
                return lack
            if not said:
                logger.warning("waiting for nodes: %s", lack)
                said = True
            time.sleep(1.0)
