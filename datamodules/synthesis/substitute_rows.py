"""Public rows in place of generated ones, for comparison with FewFedPIT's self-generated data.

Zhang et al., "FewFedPIT", https://arxiv.org/abs/2403.06131, section 4.4 and Figure 4(a), substitutes "equal proportions of
out-of-domain or domain-similar public data" (+OOD, +SIMD) or "remaining training data" of the clients' own set (+IDEAL) for
the self-generated data.

A client gets ``number`` rows of the source in each round, as many as it would keep of the candidates that it generates. The
rows are drawn anew in each round, without replacement within a client's round, and are not scored. The paper leaves open
whether the rows change from round to round; self-generated ones do.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fedlight.datamodules.rows.columns import check_columns, find_value
from fedlight.datamodules.rows.fields import make_row_key
from fedlight.datamodules.rows.instruction_rows import check_slots, read_instructions
from fedlight.datamodules.rows.rows import RowsError, load_rows
from fedlight.datamodules.synthesis.synthesis import SURVIVED, TRIED, Candidate, Synthesis
from fedlight.datamodules.text.templates import Template
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.support.checks import refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields


class SubstituteRows(Synthesis):
    """Candidates that are rows of a public source, drawn by client and round.

    Args:
        source: source of the rows, see `fedlight.datamodules.rows.rows`.
        number: rows of each client and round, >= 1; the ``keep`` of the generated candidates that they replace.
        split: split of a hub dataset.
        columns: slot of the template, or ``response``, -> column; names left out are found as by `InstructionDataModule`.
        where: column -> values; only rows with one of these values are drawn, such as ``{domain: [medicine]}``.

    Raises:
        ValueError: ``number`` is out of range; in `make`, fewer rows are left besides the client's own.
        RowsError: in `make`, the source cannot be read, or a column does not exist.
    """

    chooses = False  # rows are not scored

    def __init__(
        self,
        source: str,
        number: int = 16,
        split: str = "train",
        columns: dict[str, str] | None = None,
        where: dict[str, list[str]] | None = None,
    ) -> None:
        super().__init__()
        refuse_below(1, number=number)
        self.source, self.number, self.split = source, number, split
        self.columns, self.where = columns or {}, where or {}
        self._pools: dict[tuple[str, ...], list[dict[str, str]]] = {}

    def make(
        self, clients: Mapping[str, Sequence[Fields]], template: Template, model: AnswersPrompts, seed: int
    ) -> dict[str, list[Candidate]]:
        pool = self._read_pool(template)
        drawn = {client: self._draw(client, pool, rows, seed) for client, rows in clients.items()}
        total = sum(map(len, drawn.values()))
        self.counts, self.notes = Counter({TRIED: total, SURVIVED: total}), Counter()
        return drawn

    def _draw(
        self, client: str, pool: Sequence[dict[str, str]], rows: Sequence[Fields], seed: int
    ) -> list[Candidate]:
        held = set(map(make_row_key, rows))  # a client gets none of its own rows
        left = [row for row in pool if make_row_key(row) not in held]
        if len(left) < self.number:
            raise ValueError(
                f"{self.source}: {len(left)} rows are no rows of client {client}, fewer than number={self.number}: give a "
                "larger source, or a lower number"
            )
        rng = np.random.default_rng(derive_seed(seed, "substitute", client))
        return [Candidate(dict(left[index])) for index in rng.choice(len(left), self.number, replace=False)]

    def _read_pool(self, template: Template) -> list[dict[str, str]]:
        """Return the texts of the template's slots in each row of the source, read once, as clients' rows are read."""
        if template.slots not in self._pools:
            check_slots(self.columns, template)
            rows = load_rows(self.source, self.split)
            check_columns(rows, {column: column for column in self.where}, self.source, "where")
            kept = [row for row in rows if all(str(find_value(row, c)) in v for c, v in self.where.items())]
            if not kept:
                raise RowsError(f"{self.source}: no row has {self.where}. Check where.")
            self._pools[template.slots] = read_instructions(kept, self.columns, template, self.source)
        return self._pools[template.slots]
