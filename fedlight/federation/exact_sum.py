"""Exact sums of tensors: the same bits in any order of the addends, and for any number of partial sums.

Every finite fp64 number is a whole multiple of 2^-1074, so of 2^-1106. A sum is held as such an integer, in digits of 48
bits with a sign, one fp64 tensor for each digit that some element needs (a long accumulator: Kulisch and Miranker,
"Computer Arithmetic in Theory and Practice", 1981; Collange et al., "Numerical reproducibility for the parallel reduction
on multi- and many-core architectures", Parallel Computing 49, 2015). Digits are whole numbers below 2^53, which fp64 adds
without rounding, several times as fast as int64. The sum is rounded to fp64 once, when it is read. Digits are added as they
are needed, so nothing overflows before the sum itself leaves the range of fp64, where it becomes infinite.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch import Tensor

from fedlight.federation.client import State

BITS = 48
"""Of a digit; fp64 leaves 5 for the sum of digits, so carries are due after ``MOST_ADDENDS``."""
MOST_ADDENDS = 31
SMALLEST = -1074
"""``2**SMALLEST`` is the smallest fp64 number above 0."""
LOWEST = -1106
"""Digit 0 counts multiples of ``2**LOWEST``. Two digits hold all bits of numbers from 2^-46 to 1/4, as of most movements."""
EXACT = range(1, 44)
"""Digits whose value is always an fp64 number: the unit of digit 0 is too small for one, digit 44 may be too large."""
CHUNK = 2**15
"""Elements that are worked on at once, so that temporary tensors stay in the processor's cache. Torch works on so few
in one thread: beside a busy process, two threads that wait for each other after each short step take many times as long."""
BLOCK = 2**19
"""Elements of a block of `ExactSums`, a multiple of ``CHUNK``: 4 MiB a digit."""
MOST_BYTES = 2**26
"""Of the digits of blocks that processes add up in one exchange."""


class ExactSum:
    """Sum of tensors of one shape. NaN and infinities add up as in IEEE 754, where their order does not matter either.

    Memory: 8 bytes per element and digit; of movements, which span about 90 bits, two digits, seldom three.

    Examples:
        >>> total = ExactSum((1,))
        >>> for value in (1e30, 1.0, -1e30, 1e-30):
        ...     total.add(torch.tensor([value], dtype=torch.float64))
        >>> total.rounded().item() == 1.0 + 1e-30, total.rounded().item()
        (True, 1.0)
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = tuple(shape)
        self._digits: dict[int, Tensor] = {}
        self._addends = 0
        self._not_finite: Tensor | None = None

    def add(self, value: Tensor, times: float = 1.0) -> None:
        """Add ``times * value``, the product rounded to fp64; ``value`` is real, of any number type, and not changed.

        Raises:
            ValueError: it has another shape than the sum, or is complex.
        """
        self._expect(value.shape)
        self.add_joined([value], times)

    def add_joined(self, values: Iterable[Tensor], times: float = 1.0) -> None:
        """Add ``times`` the elements of several tensors, which are as many as those of the sum, one tensor after another.

        Raises:
            ValueError: a tensor is complex.
        """
        if self._addends == MOST_ADDENDS:
            self._carry()
        self._addends += 1
        rest, digit = torch.empty(2, min(math.prod(self._shape), CHUNK), dtype=torch.float64)
        for where, pieces in _chunks(values, CHUNK):
            number = where.stop - where.start
            target = rest[:number]
            if len(pieces) == 1 and pieces[0].dtype == torch.float64:
                torch.mul(pieces[0], times, out=target)
            else:
                torch.cat(pieces, out=target).mul_(times)
            self._take(where, target, digit[:number])

    def _take(self, where: slice, rest: Tensor, digit: Tensor) -> None:
        """Add ``rest``, which becomes 0; ``digit`` is room to work in."""
        peak = _peak(rest)
        if not math.isfinite(peak):
            peak = self._set_aside(rest, where)
        while peak:
            index = (math.frexp(peak)[1] - 1 - LOWEST) // BITS
            self._take_digit(index, where, rest, digit)
            if index - 1 in self._digits:  # mostly needed here as well; looking first would be one more pass
                self._take_digit(index - 1, where, rest, digit)
            peak = _peak(rest)

    def _take_digit(self, index: int, where: slice, rest: Tensor, digit: Tensor) -> None:
        """Add the nearest multiple of a digit's unit to it, and leave the difference in ``rest``."""
        total = self._digit(index).view(-1)[where]
        if index == 0:  # 2**LOWEST would be 0
            total.add_(rest.div_(2.0**SMALLEST), alpha=2.0 ** (SMALLEST - LOWEST))
            rest.zero_()
            return
        unit = math.ldexp(1.0, BITS * index + LOWEST)
        # A power of two divides without a rounding error, and the difference is exact: no bit of an addend is lost.
        if index == 1:  # 1 / unit would be infinite
            torch.div(rest, unit, out=digit)
        else:
            torch.mul(rest, 1 / unit, out=digit)
        total.add_(digit.round_())
        rest.sub_(digit, alpha=unit)

    def partial(self) -> dict[str, Any]:
        """Return the sum so far as tensors and plain values, for `merge`."""
        parts = self.parts()
        return {**parts, "digits": {index: digit.clone() for index, digit in parts["digits"].items()}}

    def parts(self) -> dict[str, Any]:
        """Return `partial` without a copy; the sum must not be used afterwards."""
        return {
            "shape": self._shape,
            "digits": self._digits,
            "addends": self._addends,
            "not_finite": self._not_finite,
        }

    def merge(self, partial: Mapping[str, Any]) -> None:
        """Add another sum's `partial`, which is not changed; raise ValueError if its shape is not that of the sum."""
        self._expect(partial["shape"])
        other = ExactSum(self._shape)
        other._addends = partial["addends"]
        other._digits = {index: digit.clone() for index, digit in partial["digits"].items()}
        other._not_finite = partial["not_finite"]
        self.add_elements(other, slice(None), slice(None))

    def add_elements(self, other: "ExactSum", here: slice, there: slice) -> None:
        """Add the elements ``here`` of another sum, which stays the same number, to as many ``there`` of this one."""
        if self._addends + other._addends > MOST_ADDENDS:
            self._carry()
            other._carry()
        self._addends += other._addends
        for index, digit in other._digits.items():
            self._digit(index).view(-1)[there].add_(digit.view(-1)[here])
        if other._not_finite is not None:
            self._apart().view(-1)[there].add_(other._not_finite.view(-1)[here])

    def digits_used(self) -> set[int]:
        """Return the numbers of its digits, each of them in [-2^47, 2^47] from now on."""
        self._carry()
        return {*self._digits}

    def replace(self, totals: Mapping[int, Tensor]) -> None:
        """Become the sum over all processes, given the sum of each digit that any of them uses (int64, flat)."""
        carried = torch.zeros(math.prod(self._shape), dtype=torch.int64)
        index, last = min(totals, default=0), max(totals, default=-1)
        while index <= last or bool(carried.any()):
            if index in totals:
                carried += totals[index]
            if index in totals or bool(carried.any()):
                above = (carried + 2 ** (BITS - 1)) >> BITS
                carried -= above << BITS
                if index in self._digits or bool(carried.any()):  # other blocks may need more digits
                    self._digit(index).view(-1).copy_(carried)
                carried = above
            index += 1
        self._addends = 1

    def rounded(self) -> Tensor:
        """Return the sum in fp64, correctly rounded (half to even); a sum of 0 is +0."""
        total = torch.zeros(self._shape, dtype=torch.float64)
        for start in range(0, total.numel() if self._digits else 0, CHUNK):
            where = slice(start, start + CHUNK)
            part = {index: digit.view(-1)[where] for index, digit in sorted(self._digits.items())}
            if len(part) > 2:  # a few elements may need a digit that is 0 elsewhere
                part = {index: digit for index, digit in part.items() if _peak(digit)}
            if len(part) > 2 or not all(index in EXACT for index in part):
                total.view(-1)[where] = _rounded({index: digit.clone() for index, digit in part.items()})
                continue
            for index, digit in part.items():  # two exact numbers at most: their sum is rounded once
                total.view(-1)[where].add_(digit, alpha=math.ldexp(1.0, BITS * index + LOWEST))
        if self._not_finite is not None:
            total += self._not_finite
            total.masked_fill_(total.isnan(), math.nan)  # one bit pattern for every NaN
        return total

    def _expect(self, shape: Sequence[int]) -> None:
        if self._shape != tuple(shape):
            raise ValueError(
                f"a tensor of shape {tuple(shape)} cannot be added to a sum of shape {self._shape}"
            )

    def _digit(self, index: int) -> Tensor:
        if index not in self._digits:
            self._digits[index] = torch.zeros(self._shape, dtype=torch.float64)
        return self._digits[index]

    def _apart(self) -> Tensor:
        """Return the sum of NaN and infinities."""
        if self._not_finite is None:
            self._not_finite = torch.zeros(self._shape, dtype=torch.float64)
        return self._not_finite

    def _set_aside(self, values: Tensor, where: slice) -> float:
        """Add NaN and infinities apart, put 0 in their place, and return the largest magnitude that is left."""
        odd = ~values.isfinite()
        self._apart().view(-1)[where] += values.where(odd, 0.0)
        return _peak(values.masked_fill_(odd, 0.0))

    def _carry(self) -> None:
        """Bring all digits into [-2^47, 2^47], so that the sum counts as one addend."""
        _carry(self._digits)
        self._addends = 1


class ExactSums:
    """Exact sums by name, such as those of a federated state.

    Tensors that are added together are summed as one, which is much faster for many small ones, in blocks of ``BLOCK``
    elements, so that sums of a whole model are sent and rounded a few blocks at a time.
    """

    def __init__(self) -> None:
        self._sums: dict[Layout, dict[int, ExactSum]] = {}
        self._totals: dict[Layout, dict[int, ExactSum]] = {}

    def add(self, values: Mapping[str, Tensor], times: float = 1.0) -> None:
        """Add ``times`` each tensor to the sum of its name, the product rounded to fp64."""
        layout = tuple((name, tuple(value.shape)) for name, value in values.items())
        self._sums.setdefault(layout, {})
        for where, pieces in _chunks(values.values(), BLOCK):
            self._block(layout, where.start // BLOCK).add_joined(pieces, times)

    def _block(self, layout: "Layout", number: int) -> ExactSum:
        blocks = self._sums.setdefault(layout, {})
        if number not in blocks:
            blocks[number] = ExactSum((min(BLOCK, _size(layout) - number * BLOCK),))
        return blocks[number]

    def partial(self) -> list[Any]:
        """Return the sums so far as tensors and plain values, a list of blocks, and start anew."""
        sums, self._sums = self._sums, {}
        parts: list[Any] = []
        for layout, blocks in sums.items():
            parts += [(layout, number, block.parts()) for number, block in blocks.items()]
            if not blocks:  # tensors without elements
                parts.append((layout, 0, None))
        return parts

    def merge(self, partial: Sequence[Any]) -> None:
        """Add the sums of another `partial`, or of some blocks of it."""
        for names, number, part in partial:
            layout = tuple((name, tuple(shape)) for name, shape in names)
            self._sums.setdefault(layout, {})
            if part is not None:
                self._block(layout, number).merge(part)

    def names(self) -> set[tuple[str, ...]]:
        """Return the names of tensors that were added together, for each group of them."""
        return {tuple(name for name, _ in layout) for layout in (*self._sums, *self._totals)}

    def add_up(self, team: "Team") -> None:
        """Add up the sums of all processes so far; `partial` then has later additions, and `result` has both.

        A process receives each block about twice, however many processes there are.
        """
        known = {digest_of(layout): layout for layout in self._sums}
        uses = {
            key: (
                sorted(set().union(*(block.digits_used() for block in self._sums[layout].values()))),
                any(block._not_finite is not None for block in self._sums[layout].values()),
            )
            for key, layout in known.items()
        }
        everyones = team.gather(uses, "digits of sums")
        for key, layout in sorted(layouts_of_all(team, known, everyones).items()):
            uses_of_all = [each[key] for each in everyones if key in each]
            digits = sorted({digit for used, _ in uses_of_all for digit in used})
            blocks = [self._block(layout, number) for number in range(-(-_size(layout) // BLOCK))]
            # As many as a message takes: each costs the latency of a whole ring of processes.
            together = max(1, MOST_BYTES // (8 * BLOCK * max(1, len(digits))))
            for some in (blocks[start : start + together] for start in range(0, len(blocks), together)):
                _add_up(some, digits, team)
            for block in blocks if any(odd for _, odd in uses_of_all) else ():
                team.add(block._apart())
            self._sums.setdefault(layout, {})
        self._totals, self._sums = self._sums, {}

    def result(self) -> State:
        """Return the sums in fp64, correctly rounded, and start anew; a name without addends is absent."""
        for layout, totals in self._totals.items():
            later = self._sums.setdefault(layout, {})
            for number, block in totals.items():
                if number in later:
                    block.add_elements(later[number], slice(None), slice(None))
                later[number] = block
        sums, self._sums, self._totals = self._sums, {}, {}
        times = Counter(name for layout in sums for name, _ in layout)
        shapes = {name: shape for layout in sums for name, shape in layout}
        state: State = {n: torch.zeros(s, dtype=torch.float64) for n, s in shapes.items() if times[n] == 1}
        # A name of several layouts has several sums, which are added before the total is rounded, once.
        shared = {name: ExactSum(shape) for name, shape in shapes.items() if times[name] > 1}
        for layout, blocks in sums.items():
            while blocks:
                number, block = blocks.popitem()  # a block's digits are freed once it is rounded
                start, stop = number * BLOCK, min((number + 1) * BLOCK, _size(layout))
                alone = block.rounded() if any(times[name] == 1 for name, _ in layout) else None
                for name, _, where in places_of(layout):
                    low, high = max(start, where.start), min(stop, where.stop)
                    if low >= high:
                        continue
                    here = slice(low - start, high - start)
                    there = slice(low - where.start, high - where.start)
                    if times[name] == 1:
                        assert alone is not None
                        state[name].view(-1)[there] = alone[here]
                    else:
                        shared[name].add_elements(block, here, there)
        return state | {name: total.rounded() for name, total in shared.items()}


Layout = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of tensors that are added together, in this order."""


class Team(Protocol):
    """Processes that put together what each has of a round; every one of them makes the same calls."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the values of all processes, given the name of the exchange."""

    def swap(self, values: Sequence[Any], what: str) -> list[Any]:
        """Send the value of each rank to that process, and return the values for this one."""

    def add(self, tensor: Tensor) -> None:
        """Add up a tensor over all processes, in place, as `ExactSum.add_up` needs it."""


def _add_up(blocks: Sequence[ExactSum], digits: Sequence[int], team: Team) -> None:
    """Add up blocks over all processes in one exchange.

    Digits are whole numbers, whose sums over up to 2^15 processes are exact in int64.
    """
    sizes = [math.prod(block._shape) for block in blocks for _ in digits]
    total = torch.empty(sum(sizes), dtype=torch.int64)
    parts = iter(total.split(sizes))
    by_block = [{index: next(parts) for index in digits} for _ in blocks]
    for block, totals in zip(blocks, by_block, strict=True):
        for index, part in totals.items():
            part.copy_(block._digits[index].view(-1)) if index in block._digits else part.zero_()
    if sizes:
        team.add(total)
    for block, totals in zip(blocks, by_block, strict=True):
        block.replace(totals)


def layouts_of_all(
    team: Team, known: Mapping[str, Layout], everyones: Sequence[Collection[str]]
) -> dict[str, Layout]:
    """Return the layouts of all processes by their digests: those of this one, and the digests that each process knows."""
    layouts = dict(known)
    lacking = {key for each in everyones for key in each if any(key not in other for other in everyones)}
    if lacking:  # a process has not trained these tensors: the first that has tells their layout
        before = {key for each in everyones[: team.rank] for key in each}
        first = (lacking & {*known}) - before
        for new in team.gather({key: known[key] for key in first}, "layouts"):
            layouts |= {key: tuple((name, tuple(size)) for name, size in each) for key, each in new.items()}
    return layouts


def digest_of(layout: tuple[object, ...]) -> str:
    """Return a digest that only equal layouts, or equal names, share."""
    return blake2b(repr(layout).encode(), digest_size=16).hexdigest()


def _size(layout: Layout) -> int:
    return sum(math.prod(shape) for _, shape in layout)


def places_of(layout: Layout) -> Iterator[tuple[str, tuple[int, ...], slice]]:
    """Yield name and shape of each tensor, and the place of its elements among those of all."""
    start = 0
    for name, shape in layout:
        stop = start + math.prod(shape)
        yield name, shape, slice(start, stop)
        start = stop


def _chunks(values: Iterable[Tensor], size: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield the elements of tensors in chunks: the chunk's place among all elements, and its pieces on the CPU."""
    start = filled = 0
    pieces: list[Tensor] = []
    for value in values:
        if value.is_complex():
            raise ValueError(f"an exact sum takes real numbers, not {value.dtype}: add both parts apart")
        flat = value.detach().reshape(-1).cpu()
        number, taken = value.numel(), 0
        while taken < number:
            more = min(number - taken, size - filled)
            pieces.append(flat if more == number else flat[taken : taken + more])
            taken, filled = taken + more, filled + more
            if filled == size:
                yield slice(start, start + filled), pieces
                start, filled, pieces = start + filled, 0, []
    if pieces:
        yield slice(start, start + filled), pieces


def _peak(values: Tensor) -> float:
    """Return the largest magnitude; NaN where there is one."""
    least, most = torch.aminmax(values)
    return max(most.item(), -least.item())


def _carry(digits: dict[int, Tensor]) -> None:
    """Bring digits into [-2^47, 2^47], in place; a carry out of the highest becomes a new digit."""
    index = min(digits, default=0)
    while index <= max(digits, default=-1):
        if (digit := digits.get(index)) is not None:
            carried = (digit * 2.0**-BITS).round_()
            if _peak(carried):
                digit.sub_(carried, alpha=2.0**BITS)
                digits[index + 1] = digits[index + 1].add_(carried) if index + 1 in digits else carried
        index += 1


def _rounded(digits: dict[int, Tensor]) -> Tensor:
    """Return ``sum(digits[i] * 2**(BITS * i + LOWEST))``, correctly rounded; digits are changed in place."""
    _carry(digits)
    total = _leading(digits, LOWEST)
    if not math.isfinite(_peak(total)):  # the sum, or its highest digit alone, is above the range of fp64
        total = total.where(total.isfinite(), _leading(digits, LOWEST - 2 * BITS) * 2.0 ** (2 * BITS))
    return total


def _leading(digits: Mapping[int, Tensor], exponent: int) -> Tensor:
    """Return the sum of digits in [-2^47, 2^47] times ``2**(BITS * index + exponent)`` in fp64, correctly rounded.

    Digits are added from the highest on to a number ``high`` and its loss ``lost``. Only half a unit in the last place may
    be rounded the wrong way then: the sign of the rest ``left`` decides. It is `math.fsum` for whole tensors.
    """
    high, lost, left = torch.zeros(3, *next(iter(digits.values())).shape, dtype=torch.float64)
    for index in sorted(digits, reverse=True):
        power = BITS * index + exponent
        digit = digits[index] * (math.ldexp(1.0, max(power, SMALLEST)) if power < 1024 else math.inf)
        if power < SMALLEST:
            digit *= math.ldexp(1.0, power - SMALLEST)
        if power >= 1024:
            digit.nan_to_num_(0.0, math.inf, -math.inf)  # of 0 times infinity
        # Errors are exact where the first number is 0 or has the larger magnitude (Dekker, 1971), as here.
        below = lost + digit
        left += digit.sub_(below - lost)
        total = high + below
        high, lost = total, below.sub_(total - high)
    if not _peak(left):
        return high
    up = high + 2 * lost
    halfway = (up - high == 2 * lost) & (lost.sign() * left.sign() > 0)
    return high.where(~halfway, up)
