"""The rows that a server holds: of several sources, each once, without what its clients keep to themselves.

What counts as equal are the template's slots with the response. An instruction that is answered in several ways stays in
as often as it has answers: each is a row of its own, and one client may get several of them.

Leaving out what clients have keeps an experiment clean; a server that does not see the clients' rows could not do it. Who
knows the public sources could tell from a row that nobody ever gets that some client may have it. In a real federation each
client drops by itself what it has, of what it is sent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fedlight.datamodules.instructions.augmentation import NO_SLOTS
from fedlight.support.types import Fields

Question = tuple[str, ...]
"""What a row asks; see `question`."""


@dataclass
class PublicRows:
    """Public rows and what was left out on the way to them.

    Attributes:
        rows: template slots, ``response``, and ``category`` where a column says so.
        sources: where each comes from, ``len(rows)`` names.
        repeated: rows left out since an earlier row is equal.
        private: rows left out since a client has them.
        asked: rows left out since their question is one of a client's validation examples, or held out.
    """

    rows: list[Fields] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    repeated: int = 0
    private: int = 0
    asked: int = 0

    @classmethod
    def gather(
        cls,
        found: Iterable[tuple[str, Sequence[Fields]]],
        private: Sequence[Fields] = (),
        asked: Sequence[Fields] = (),
    ) -> "PublicRows":
        """Puts sources together.

        Args:
            found: of each source its name and its rows.
            private: the clients' rows.
            asked: the rows that clients are scored on, or that are held out.

        Example:
            >>> rows = [{"prompt": p, "response": r} for p, r in zip("xxxyz", "12134", strict=True)]
            >>> public = PublicRows.gather([("file", rows)], private=[rows[3]], asked=[{"prompt": "z", "response": "5"}])
            >>> [row["response"] for row in public.rows], public.repeated, public.private, public.asked
            (['1', '2'], 1, 1, 1)
        """
        own, questions = {whole(row) for row in private}, {question(row) for row in asked}
        seen: set[Question] = set()
        public = cls()
        for source, rows in found:
            for row in rows:
                key = whole(row)
                if key in own:
                    public.private += 1
                elif question(row) in questions:
                    public.asked += 1
                elif key in seen:
                    public.repeated += 1
                else:
                    seen.add(key)
                    public.rows.append(row)
                    public.sources.append(source)
        return public

    def __str__(self) -> str:
        places = len(set(self.sources))
        return (
            f"{len(self.rows):,} public rows of {places} source{'s'[: places != 1]}; left out: {self.repeated:,} repeated, "
            f"{self.private:,} equal to a client's, {self.asked:,} asked in validation or held out"
        )


def question(row: Fields) -> Question:
    """What a row asks: its slots, whatever the order of its columns.

    Example:
        >>> question({"input": "1 2", "instruction": "Add.", "response": "3", "category": "sums"})
        ('input', '1 2', 'instruction', 'Add.')
    """
    return tuple(
        part for name in sorted(row) if name not in NO_SLOTS and row[name] for part in (name, row[name])
    )


def whole(row: Fields) -> tuple[str, ...]:
    """What makes a row what it is: its slots and its response.

    Example:
        >>> whole({"instruction": "Add.", "response": "3"})
        ('instruction', 'Add.', '3')
    """
    return (*question(row), row["response"])
