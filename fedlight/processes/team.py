"""Processes that train one federation together, and the exchange of their results.

Each call of a team is made by all its processes, in the same order. Whatever is computed from the gathered values is then
the same in each of them, so no decision has to be sent.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor

MESSAGE_BYTES = 64 * 2**20
"""Of all processes' parts of a message, as far as their values can be sent apart."""
AddUp = Callable[["Tensor"], None]
Exchange = Callable[[memoryview], list[memoryview]]
"""Function that gives every process the bytes of all, in the order of their ranks, once all have called it."""
Swap = Callable[[Sequence[memoryview]], list[memoryview]]
"""Function that gives every process the bytes that each has for it, in the order of their ranks."""


class Team:
    """Processes of one run; without other arguments, the team of a single process.

    Args:
        rank: number of this process, in [0, size).
        size: number of processes, at least 1.
        exchange: way to the other processes.
        add: function that adds up a tensor over all processes, in place; None: by ``exchange``.
        swap: way to send each process something else; None: by ``exchange``.
        per_client: number of processes that train each client together, a divisor of ``size``.
        add_here: function that adds up a tensor over `same_place`, in place; None: by ``exchange``.

    Attributes:
        seats: groups of processes that train a client together; with ``per_client=1`` each process is one.
        seat: number of this process's group, in [0, seats).
        same_place: one process of each group, with the same place in it as this one, as a team; all teams of
            this kind make the same calls at the same time. With ``per_client=1`` it is the team itself.

    Raises:
        ValueError: rank or size is out of range, or there is no way to the others.

    Examples:
        >>> Team().gather({"loss": 0.5})
        [{'loss': 0.5}]
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        exchange: Exchange | None = None,
        add: AddUp | None = None,
        swap: Swap | None = None,
        per_client: int = 1,
        add_here: AddUp | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} must be in [0, {size}), the number of processes")
        if size > 1 and exchange is None:
            raise ValueError(f"a team of {size} processes needs a way to exchange what they have")
        self.rank = rank
        self.size = size
        self.per_client = per_client
        self.seats, self.seat = size // per_client, rank // per_client
        self._exchange = exchange
        self._add = add
        self._swap = swap
        self.same_place = self
        if per_client > 1 and exchange is not None:
            here = slice(rank % per_client, None, per_client)
            self.same_place = Team(self.seat, self.seats, lambda data: exchange(data)[here], add_here)

    @property
    def leads(self) -> bool:
        """Whether this process is the first of its group, whose results count once for all of them."""
        return self.rank % self.per_client == 0

    def gather(self, value: Any, what: str = "gather") -> list[Any]:
        """Return the values of all processes in the order of their ranks; tensors come back on the CPU, as copies.

        Args:
            value: tensors, numbers, strings, bytes, None, and dicts, lists, tuples and sets of them.
            what: name of the exchange; processes notice by it that they are not at the same place.

        Raises:
            ValueError: another process is at another exchange.
        """
        if self._exchange is None:  # neither copied nor packed: sums of a whole model are gigabytes
            return [value]
        return self._unpacked(self._exchange(_packed((what, value))), what)

    def _unpacked(self, received: list[memoryview], what: str) -> list[Any]:
        import torch  # here, as in _packed

        answers = []
        while received:  # whatever is unpacked is freed: sums of a whole model are gigabytes
            data = io.BytesIO(received.pop(0))
            # No code that another host has pickled is run.
            answers.append(torch.load(data, map_location="cpu", weights_only=True))
        for rank, (where, _) in enumerate(answers):
            if where != what:
                raise ValueError(
                    f"process {self.rank} is at {what!r} and process {rank} at {where!r}: something made one of them go "
                    "another way, such as a callback that stops the run by its own process's batches or clock"
                )
        return [answer for _, answer in answers]

    def swap(self, values: Sequence[Any], what: str = "swap") -> list[Any]:
        """Send the value of each rank to that process, and return the values for this one, in the order of the ranks."""
        if self._swap is None:
            return [each[self.rank] for each in self.gather([*values], what)]
        return self._unpacked(self._swap([_packed((what, value)) for value in values]), what)

    def add(self, tensor: "Tensor") -> None:
        """Add up a tensor of one shape over all processes, in place.

        A process receives the tensor about twice, however many processes there are.
        """
        if self._add is not None:
            self._add(tensor)
        elif self.size > 1:
            tensor.copy_(sum(self.gather(tensor, "sum")))

    def gather_each(self, values: Iterable[Any], what: str = "gather") -> Iterator[list[list[Any]]]:
        """Yield the values of all processes in several messages: for each process its next ones, in order.

        Values of a message have at most ``MESSAGE_BYTES`` together in all processes, or one value each. Processes may have
        unlike numbers of values; one that has no more sends none.
        """
        left = iter(values)
        more = True
        upcoming = next(left, self)  # itself stands for the end
        while more:
            part: list[Any] = []
            room = MESSAGE_BYTES / self.size
            while upcoming is not self and (not part or num_bytes(upcoming) <= room):
                part.append(upcoming)
                room -= num_bytes(upcoming)
                upcoming = next(left, self)
            gathered = self.gather((part, upcoming is not self), what)
            part = []  # it is among those gathered, and freed with them
            more = any(has_more for _, has_more in gathered)
            yield [list(some) for some, _ in gathered]

    def broadcast(self, value: Any, what: str = "broadcast") -> Any:
        """Return the value of process 0; the others' values are not sent."""
        return self.gather(value if self.rank == 0 else None, what)[0]

    def barrier(self, what: str = "barrier") -> None:
        """Wait until all processes are here."""
        self.gather(None, what)


ALONE = Team()
"""Team of a single process."""
_running: list[Team] = []


def current_team() -> Team:
    """Return the team of the strategy under which the trainer runs now; `ALONE` without one."""
    return _running[-1] if _running else ALONE


@contextmanager
def working_in(team: Team) -> Iterator[None]:
    """Make ``team`` the current one while the body runs."""
    begin(team)
    try:
        yield
    finally:
        end(team)


def begin(team: Team) -> None:
    """Make ``team`` the current one until `end`."""
    _running.append(team)


def end(team: Team) -> None:
    """Make the team before ``team`` the current one again."""
    if team in _running:  # a strategy is torn down also where its set-up has failed
        _running.remove(team)


def share(costs: Sequence[float], size: int) -> list[int]:
    """Return for each piece of work the process that does it: the longest first, each to the process with least to do.

    Equal costs go in their order, and equal loads to the lower rank, so all processes find the same.

    Args:
        costs: cost of each piece in any unit, at least 0.
        size: number of processes, at least 1.

    Examples:
        >>> share([1.0, 5.0, 2.0, 2.0], size=2)
        [1, 0, 1, 1]
    """
    loads = [0.0] * size
    ranks = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        ranks[i] = loads.index(min(loads))
        loads[ranks[i]] += costs[i]
    return ranks


def num_bytes(value: Any) -> int:
    """Return about the bytes of tensors, numbers, strings, and of dicts, lists and tuples of them."""
    if isinstance(value, Mapping):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(num_bytes, value))
    return int(getattr(value, "nbytes", 8))


def _packed(value: Any) -> memoryview:
    """Return ``value`` as `torch.save` writes it; of a view its own elements alone, not the whole storage."""
    import torch  # here: a report asks for its team on the way to an encoder, and needs no torch

    written = _Written()
    torch.save(_with_small_storage(value), cast(IO[bytes], written))
    return memoryview(written.content)


class _Written:
    """Bytes that a file gets. Of a view of io.BytesIO Python 3.13 complains when both are collected in a cycle."""

    def __init__(self) -> None:
        self.content = bytearray()

    def write(self, data: bytes) -> int:
        self.content.extend(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: there is no file behind it."""


def _with_small_storage(value: Any) -> Any:
    from torch import Tensor

    if isinstance(value, Tensor):
        value = value.detach()
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value if whole else value.clone()
    if type(value) is dict:
        return {key: _with_small_storage(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_with_small_storage, value))
    return value
