"""Rendered prompts for generation by ``trainer.predict``."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import StackDataset

from fedlight.datamodules.federated.datamodule import FederatedDataModule
from fedlight.datamodules.rows.columns import check_columns, check_names, field_at
from fedlight.datamodules.rows.exclusion import Excluded, exclude_prompts
from fedlight.datamodules.rows.given import RowsError, Source, name_source, refuse_too_long
from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.text.encoding import leading_ids
from fedlight.datamodules.text.templates import Template
from fedlight.datamodules.text.tokens import fit_texts
from fedlight.pretrained.hub import load_tokenizer
from fedlight.support.checks import refuse_below
from fedlight.support.needs import Need, RowSource
from fedlight.support.types import Fields


class PromptDataModule(FederatedDataModule):
    """Prompts without answers, each distinct prompt once.

    Args:
        source: name of the rows' file, folder or data set, see `fedlight.datamodules.rows.rows`; in a program also the
            rows: a list of mappings from column to value, a DataFrame of pandas or a Dataset of ``datasets``.
        split: split of a hub dataset.
        columns: slot of the template -> column; for a slot that it leaves out the column of the slot's name.
        template: a name or a text with slots; see `fedlight.datamodules.text.templates`.
        tokenizer: hub name or folder, or ``"toy"``.
        max_tokens: most tokens of a prompt; longer prompts are truncated, or dropped and counted if they still do not fit.
        limit: number of prompts to keep, the first ones, >= 1; None: all.
        exclude: name -> rows whose texts no prompt may have, such as the posts of the clients' votes or of a test; see
            `fedlight.datamodules.rows.exclusion`. Excluded prompts are counted by name.
        eval_batch_size, seed, num_workers: see `FederatedDataModule`.

    Attributes:
        counts: numbers of rows after ``setup``; ``prompts``, ``empty``, ``repeated``, ``excluded``, ``beyond_limit`` and
            ``too_long`` add up to all rows.

    Raises:
        ValueError: ``exclude`` has a slot without a column, a name of ``columns`` is misspelled, or ``limit`` is below 1.
    """

    def __init__(
        self,
        source: Source = "toy:prompts",
        split: str = "train",
        columns: dict[str, str] | None = None,
        template: str = "toy_generation",
        tokenizer: str = "toy",
        max_tokens: int = 512,
        limit: int | None = None,
        exclude: dict[str, Excluded | None] | None = None,
        eval_batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(eval_batch_size=eval_batch_size, seed=seed, num_workers=num_workers)
        refuse_below(1, limit=limit)
        self.source, self.split = name_source(source), split
        self.template = Template.named(template, columns or {}, asks="prompt")
        check_names(columns or {}, self.template.slots)
        self.columns = {**{slot: slot for slot in self.template.slots}, **(columns or {})}
        self.tokenizer_name, self.max_tokens, self.limit = tokenizer, max_tokens, limit
        self.exclude = exclude or {}
        for name, rows in self.exclude.items():
            if rows is not None and rows.slot not in self.columns:
                raise ValueError(
                    f"exclude.{name}.slot={rows.slot!r} is none of the prompts' slots ({', '.join(self.columns)}): name one "
                    f"of them, or set exclude.{name} to null"
                )
        self.counts: dict[str, int] = {}

    @classmethod
    def requires(cls, settings: Mapping[str, Any]) -> Iterable[Need]:
        """Yield the rows of ``exclude``; the preflight check adds those of ``source``, as for every datamodule."""
        for name, rows in (settings.get("exclude") or {}).items():
            if rows:
                yield RowSource(rows["source"], rows.get("split") or "train", ((name, rows["column"]),))

    def setup(self, stage: str) -> None:
        if stage != "predict" or self.predict_set is not None:
            return
        fields, left_out = self._read()
        tokenizer = load_tokenizer(self.tokenizer_name)
        self.template = self.template.for_tokenizer(tokenizer)
        parts = [self.template.render(slots) for slots in fields]
        fitted = list(
            fit_texts(tokenizer, parts, self.max_tokens - len(leading_ids(tokenizer, self.template)))
        )
        kept = [(fit.parts.text, slots) for fit, slots in zip(fitted, fields, strict=True) if fit is not None]
        cut = sum(fit is not None and fit.parts is not part for fit, part in zip(fitted, parts, strict=True))
        self.counts |= {"prompts": len(kept), "too_long": len(fields) - len(kept)}
        rank_zero_info(
            f"{self.source}: {len(kept):,} prompts; {self.counts['too_long']:,} too long, {cut:,} cut; {left_out}"
        )
        refuse_too_long(len(kept), "prompt", self.source, self.max_tokens)
        texts, slots = zip(*kept, strict=True)
        columns: dict[str, Any] = {"prompt": texts, "fields": slots, "index": range(len(kept))}
        self.predict_set = StackDataset(**columns)

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Return a batch of prompts: ``prompt``, ``fields`` and ``stop`` as lists, ``index`` ``(batch,)``."""
        return {
            "stop": list(self.template.stops),
            "prompt": [example["prompt"] for example in examples],
            "fields": [example["fields"] for example in examples],
            "index": torch.tensor([example["index"] for example in examples]),
        }

    def _read(self) -> tuple[Sequence[Fields], str]:
        """Return the slots' texts of each prompt, and a description of the dropped rows."""
        rows = load_rows(self.source, self.split)
        check_columns(rows, self.columns, str(self.source))
        read = [{name: field_at(row, path, name) for name, path in self.columns.items()} for row in rows]
        whole = [row for row in read if all(row[name] for name in self.template.required)]
        unique = list({tuple(row.values()): row for row in whole}.values())
        if not unique:
            raise RowsError(
                f"{self.source}: every row has an empty {', '.join(self.template.required)}: check the columns"
            )
        free, held = exclude_prompts(unique, self.exclude)
        by_name = ", ".join(f"{count:,} in {name}" for name, count in held.items())
        if not free:
            raise RowsError(
                f"{self.source}: exclude leaves none of {len(unique):,} prompts ({by_name}): give other prompts, or set an "
                "entry of exclude to null"
            )
        self.counts = {
            "empty": len(read) - len(whole),
            "repeated": len(whole) - len(unique),
            "excluded": len(unique) - len(free),
            "beyond_limit": len(free) - len(free[: self.limit]),
        }
        left_out = (
            f"of {len(rows):,} rows {self.counts['empty']:,} lack a text, {self.counts['repeated']:,} repeat a prompt, "
            f"{self.counts['excluded']:,} are excluded{f' ({by_name})' if by_name else ''}, "
            f"{self.counts['beyond_limit']:,} are beyond the limit"
        )
        return free[: self.limit], left_out
