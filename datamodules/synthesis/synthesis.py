"""Synthesis: how a client of a federation makes training data for itself, with one interface for all ways.

A synthesis sees the rows of some clients and the model as it stands, and writes rows that these clients may train on in
this round. What becomes of them (scored, chosen, trained on beside the client's own or apart from these) is said elsewhere:
`fedlight.datamodules.synthesis.datamodule`, `fedlight.federation.algorithms`. Nothing that is made leaves the client.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedlight.datamodules.instructions.augmentation import settings_of
from fedlight.datamodules.text.templates import Template
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.support.types import Fields

TRIED, SURVIVED = "tried", "survived"


@dataclass(frozen=True)
class Candidate:
    """A row that was made.

    Attributes:
        fields: a text for every slot of the template, and ``response``.
        weight: what its loss is multiplied with, >= 0; a client's own rows have 1.
    """

    fields: dict[str, str]
    weight: float = 1.0


class Synthesis(ABC):
    """Makes candidates for clients.

    A subclass keeps every argument of its constructor under the same name: `settings` reads them, and candidates of an
    earlier run are taken again only where they are equal. Arguments that change no candidate are named in
    ``without_effect``.

    Attributes:
        chooses: whether the best of its candidates are chosen by a score; where not, all of them are used.
        counts: of the last `make`: ``tried``, ``survived``, and an entry for each reason for which candidates were dropped
            (a name in snake case). Those tried are those that survived and those dropped.
        notes: what else was counted in it, by a name in snake case.

    Example:
        >>> class Echo(Synthesis):
        ...     def make(self, clients, template, model, seed):
        ...         made = {client: [Candidate(dict(row)) for row in rows] for client, rows in clients.items()}
        ...         self.counts = Counter(tried=sum(map(len, made.values())), survived=sum(map(len, made.values())))
        ...         return made
        >>> echo = Echo()
        >>> echo.make({"c0": [{"instruction": "Add.", "response": "3"}]}, Template("{instruction}"), None, seed=0)
        {'c0': [Candidate(fields={'instruction': 'Add.', 'response': '3'}, weight=1.0)]}
        >>> echo.counts["survived"], echo.settings()
        (1, {'class': 'Echo'})
    """

    chooses: bool = True
    without_effect: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()

    @abstractmethod
    def make(
        self, clients: Mapping[str, Sequence[Fields]], template: Template, model: AnswersPrompts, seed: int
    ) -> dict[str, list[Candidate]]:
        """Candidates of each client, in the order in which they were made; counts them in `counts`.

        Args:
            clients: each client's own training rows.
            template: whose slots a candidate fills.
            model: that writes them, as it stands.
            seed: the result is a function of the rows, the template, the model, the settings and it.

        Returns:
            For every client of ``clients`` a list; an empty one where nothing survived.
        """

    def settings(self) -> dict[str, object]:
        """What the result depends on besides rows, template, model and seed: the class and its arguments."""
        return settings_of(self, self.without_effect)
