"""Instructions by client, with rows besides the clients' own: what FedDCA and its baselines train on.

Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA),
https://arxiv.org/abs/2409.20135. In the paper's setting 1,000 rows of a domain are drawn as private and dealt out to ten
clients (``private_rows: 1000``); the other rows of the domain and those of other domains are the server's. An augmentation
chooses among these for each client, once, before the first round.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from fedlight.datamodules.clients.splits import Split
from fedlight.datamodules.instructions.augmentation import Added, Augmentation
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord, digest_of
from fedlight.datamodules.instructions.augmentation_report import check_added, nothing_public, report
from fedlight.datamodules.instructions.datamodule import InstructionDataModule
from fedlight.datamodules.rows.fields import OWNERS, make_question_key, make_row_key
from fedlight.datamodules.rows.instruction_rows import PublicRows, check_slots, read_instructions
from fedlight.datamodules.rows.rows import RowsError, load_rows
from fedlight.datamodules.text.encoding import Encoded, encode_responses
from fedlight.datamodules.text.examples import ResponseExamples, join_examples
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields, FieldsByClient

Columns = dict[str, str]
T = TypeVar("T")


class AugmentedInstructionDataModule(InstructionDataModule):
    """Each client's own rows and what an augmentation adds to them.

    The augmentation sees the clients' training rows, never those they are scored on. Public rows that do not fit into
    ``max_tokens`` are left out before it chooses; see `PublicRows` for which others are. Nor is anything added that asks
    what a client is scored on or what is held out. Clients weigh in the average with all they train on.

    Args:
        source: where the clients' rows are; see `fedlight.datamodules.rows.rows`.
        public_source: where the server's rows are, one source or several; None: nowhere but in ``source``.
        public_split: split of a hub dataset, one for all sources or one for each.
        public_columns: where these have ``response`` and the template's slots, and ``category`` if that is to be recorded;
            one map for all sources or one for each. None: as ``columns``, without client and category.
        private_rows: so many rows of ``source``, drawn at random, are the clients'; the rest is the server's. None: all
            are the clients'.
        augmentation: what is added, for example ``FedDCA``; None: nothing.
        augmentation_folder: where the rows that were added are written and looked for, see `AugmentationRecord`. None: the
            folder ``augmentation`` in the trainer's ``default_root_dir``.
        kwargs: further arguments of `InstructionDataModule`.

    Attributes:
        added: what each client got, best first; after ``setup``.
        public: the rows that were chosen from; after ``setup``.
    """

    def __init__(
        self,
        source: str,
        public_source: str | list[str] | None = None,
        public_split: str | list[str] = "train",
        public_columns: Columns | list[Columns] | None = None,
        private_rows: int | None = None,
        augmentation: Augmentation | None = None,
        augmentation_folder: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(source, **kwargs)
        names = [public_source] if isinstance(public_source, str) else public_source or []
        own = {name: path for name, path in self.columns.items() if name not in OWNERS}
        splits = _one_each(public_split, len(names), "public_split")
        columns = _one_each(public_columns or own, len(names), "public_columns")
        each_its_own = isinstance(public_columns, list)
        where = [
            f"public_columns.{number}" if each_its_own else "public_columns" for number in range(len(names))
        ]
        for each, setting in zip(columns, where, strict=True):
            check_slots(each, self.template, setting if public_columns else "columns")
        if private_rows is not None and private_rows < 1:
            raise ValueError(f"private_rows={private_rows} must be at least 1, or null for all rows.")
        if augmentation is not None and augmentation.needs_public and not names and private_rows is None:
            raise ValueError(nothing_public(augmentation))
        if private_rows is not None and self.few_shot is not None:
            raise ValueError(
                f"private_rows={private_rows} and few_shot both say which rows are the clients'. Remove one of them."
            )
        self.public_rows = list(zip(names, splits, columns, where, strict=True))
        self.private_rows, self.augmentation = private_rows, augmentation
        self.augmentation_folder = augmentation_folder
        self.added: dict[str, list[Added]] = {}
        self.public = PublicRows()
        self._rest: list[dict[str, str]] = []

    def _own_rows(self) -> list[dict[str, str]]:
        rows = super()._own_rows()
        if self.private_rows is None:
            return rows
        order = np.random.default_rng(derive_seed(self.seed, "private rows")).permutation(len(rows))
        own: list[int] = []
        while len(own) < self.private_rows and len(order):  # in place of those too long, the next ones
            drawn, order = np.split(order, [self.private_rows - len(own)])
            own += drawn[self._encoded([rows[row] for row in drawn]).kept].tolist()
        if len(own) < self.private_rows:
            raise ValueError(
                f"private_rows={self.private_rows}, but {len(own):,} of the {len(rows):,} rows of {self.train_rows[0]} fit "
                f"into max_tokens={self.max_tokens}. Lower private_rows or raise max_tokens."
            )
        drawn_rows = set(own)
        self._rest = [row for number, row in enumerate(rows) if number not in drawn_rows]
        return [rows[row] for row in sorted(own)]

    def _with_more(
        self, examples: ResponseExamples, rows: list[dict[str, str]], split: Split
    ) -> tuple[ResponseExamples, Split]:
        private = {client: [rows[row] for row in indices] for client, indices in split.train.items()}
        asked: list[dict[str, str]] = [rows[row] for own in (split.val or {}).values() for row in own]
        asked += self._kept_for_testing()  # they could come back from a public source
        self.public = PublicRows.gather(self._read_public(), rows, asked)
        self._rest = []
        self.added = self._add(private, {make_question_key(row) for row in asked})
        if not any(self.added.values()):
            return examples, split
        distinct = {make_row_key(row.fields): row.fields for own in self.added.values() for row in own}
        place = {key: len(examples) + number for number, key in enumerate(distinct)}
        more = ResponseExamples(self._encoded(list(distinct.values())), np.arange(len(distinct)))
        train = {
            client: np.array(
                [*own, *(place[make_row_key(row.fields)] for row in self.added[client])], dtype=np.int64
            )
            for client, own in split.train.items()
        }
        return join_examples(examples, more), replace(split, train=train)

    def _trained_rows(self) -> list[Fields]:
        added = [row.fields for rows in self.added.values() for row in rows]
        return [*super()._trained_rows(), *added]

    def _read_public(self) -> list[tuple[str, Sequence[Fields]]]:
        """Name and rows of each source; what is left of the clients' own comes first."""
        found: list[tuple[str, Sequence[Fields]]] = []
        if self._rest:
            rest = [{name: text for name, text in row.items() if name != "client"} for row in self._rest]
            found.append((self.train_rows[0], rest))
        for source, split, columns, setting in self.public_rows:
            raw = load_rows(source, split)
            found.append((source, read_instructions(raw, columns, self.template, source, setting)))
        return found

    def _add(self, private: FieldsByClient, asked: set[tuple[str, ...]]) -> dict[str, list[Added]]:
        """What each client gets: from the record of an earlier run where that is still right, else chosen now."""
        settings, record = self._settings(private, asked), self._record()
        why_not = "nowhere to look" if record is None else record.why_not(settings)
        if record is not None and why_not is None:
            saved = record.read()
            added = {client: saved.get(client, []) for client in private}
            rank_zero_info(f"{record.folder}: rows added by an earlier run with the same settings and texts")
        else:
            if record is not None and record.settings.exists():
                rank_zero_info(f"{record.folder}: its rows are not used: {why_not}")
            if record is not None:
                record.make_folder()
            if record is not None and self.augmentation is not None:
                self.augmentation.keep_in(record.folder / "unfinished")
            added, notes = self._choose(private, asked)
            if record is not None:
                record.write(settings, private, added, self.public.sources, notes)
        if self.augmentation is not None:
            rank_zero_info(report(self.augmentation, added, len(self.public.rows)))
        return added

    def _choose(
        self, private: FieldsByClient, asked: set[tuple[str, ...]]
    ) -> tuple[dict[str, list[Added]], dict[str, object]]:
        """Asks the augmentation; also says what is worth keeping of that."""
        if self.augmentation is None:
            return {client: [] for client in private}, {}
        fits = np.arange(0)
        if self.augmentation.needs_public:
            fits = np.flatnonzero(self._encoded(self.public.rows).kept)
            too_long = len(self.public.rows) - len(fits)
            rank_zero_info(f"{self.public}, {too_long:,} longer than max_tokens={self.max_tokens}")
            if not len(fits):
                raise RowsError(
                    f"{nothing_public(self.augmentation)} Left out: {self.public}, {too_long:,} too long."
                )
        found = self.augmentation.augment(private, [self.public.rows[row] for row in fits], self.seed)
        check_added(self.augmentation, found, private, len(fits))
        added, known, too_long = {}, 0, 0
        for client in private:
            rows = [self._complete(row, fits) for row in found[client]]
            new = [row for row in rows if make_question_key(row.fields) not in asked]
            kept = self._encoded([row.fields for row in new]).kept
            known, too_long = known + len(rows) - len(new), too_long + int(len(new) - kept.sum())
            added[client] = [row for row, fit in zip(new, kept, strict=True) if fit]
        if known or too_long:
            rank_zero_info(
                f"left out of the generated rows: {known:,} asked in validation or held out, {too_long:,} longer than "
                f"max_tokens={self.max_tokens}"
            )
        return added, {"public_rows": len(fits), **self.augmentation.record()}

    def _complete(self, row: Added, fits: np.ndarray) -> Added:
        """The same with a text for every slot, and as its number that in `public`."""
        fields = {**dict.fromkeys(self.template.slots, ""), **row.fields}
        return Added(fields, None if row.row is None else int(fits[row.row]), row.score)

    def _settings(self, private: FieldsByClient, asked: set[tuple[str, ...]]) -> dict[str, object]:
        """What the rows that are added depend on."""
        own = [{"client": client, **row} for client, rows in private.items() for row in rows]
        augmentation = self.augmentation
        needs_public = augmentation is not None and augmentation.needs_public
        # Public rows are without what is asked before they are chosen from; generated ones are sifted afterwards.
        generates = augmentation is not None and not needs_public
        sifted = digest_of({"asked": "\n".join(row)} for row in sorted(asked)) if generates else None
        return {
            **({"validation rows": sifted} if generates else {}),
            "augmentation": None if augmentation is None else augmentation.settings(),
            "seed": self.seed,
            "tokenizer": self.tokenizer_name,
            "max_tokens": self.max_tokens,
            "template": self.template.text,
            "private rows": digest_of(own),
            "public rows": digest_of(self.public.rows) if needs_public else None,
        }

    def _record(self) -> AugmentationRecord | None:
        if self.augmentation_folder is not None:
            return AugmentationRecord(self.augmentation_folder)
        if self.trainer is None:  # set up by hand: nobody said where
            return None
        return AugmentationRecord(Path(self.trainer.default_root_dir) / "augmentation")

    def _encoded(self, rows: Sequence[Fields]) -> Encoded:
        responses = [row["response"] for row in rows]
        return encode_responses(self.tokenizer, self.template, rows, responses, self.max_tokens)


def _one_each(given: T | list[T], number: int, setting: str) -> list[T]:
    """What holds for each of several sources: the same for all, or one for each."""
    each = given if isinstance(given, list) else [given] * number
    if len(each) != number:
        raise ValueError(
            f"{setting} has {len(each)} entries, but public_source has {number}. Give one for all or one for each."
        )
    return each
