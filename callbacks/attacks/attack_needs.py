"""What an attack needs of others: the clients' rows of the datamodule, the uploads of the federated loop."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor

from fedlight.callbacks.loop.round_table import Row
from fedlight.support.types import Fields, FieldsByClient


class Text(Protocol):
    """A rendered prompt."""

    @property
    def text(self) -> str:
        """All of it."""


class RendersPrompts(Protocol):
    """What is needed of a template; see ``fedlight.datamodules.text.templates``."""

    @property
    def text(self) -> str:
        """The text with slots in braces."""

    @property
    def without(self) -> "RendersPrompts | None":
        """The form for rows that lack a slot, if there is one."""

    def render(self, fields: Fields) -> Text:
        """The prompt of a row."""


@runtime_checkable
class HoldsClientRows(Protocol):
    """What is needed of the datamodule, after ``setup("fit")``.

    Attributes:
        client_rows: each client's own training rows, with planted canaries.
        planted: the canaries of each client that has some, each once.
        template: makes prompts of rows.
    """

    client_rows: FieldsByClient
    planted: FieldsByClient
    template: RendersPrompts

    def unseen_rows(self) -> Sequence[Fields]:
        """Rows like the clients' that nobody trains on; empty where there are none."""


class Upload(Protocol):
    """What reached the server of one client; see ``fedlight.federation.client``."""

    @property
    def client_id(self) -> str:
        """Whose."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Its parameters."""


@runtime_checkable
class TakesUploads(Protocol):
    """What is needed of the federated loop.

    Attributes:
        rounds_done: rounds whose server step is done.
        visit_records: a row for each finished visit of the round, with its ``client``.
    """

    rounds_done: int
    visit_records: list[Row]

    @property
    def upload(self) -> Upload | None:
        """What was got last, of a visit that gave an update; None in a round until the first has come."""

    def holding(self, state: dict[str, Tensor]) -> AbstractContextManager[None]:
        """Has this state in the module while the body runs."""


def prompts_of(template: RendersPrompts, rows: Sequence[Fields]) -> list[str]:
    """The prompt of each row."""
    return [template.render(row).text for row in rows]


def ending(prompt: str, response: str) -> str:
    r"""A response as it stands behind its prompt in training, with a blank between the two.

    Example:
        >>> ending("### Response:", "Yes."), ending("Answer:\n", "Yes.")
        (' Yes.', 'Yes.')
    """
    return response if prompt[-1:].isspace() else f" {response}"


def without_planted(data: HoldsClientRows) -> dict[str, list[Fields]]:
    """Each client's own rows without the canaries among them."""
    return {
        client: [row for row in rows if row not in data.planted.get(client, ())]
        for client, rows in data.client_rows.items()
    }
