"""Instructions by client, with what each client makes for itself in each round.

What FewFedPIT and its relatives train on besides the clients' own rows: Zhang et al., "FewFedPIT: Towards
Privacy-preserving and Few-shot Federated Instruction Tuning", https://arxiv.org/abs/2403.06131. An algorithm asks for
candidates before a round is planned, has them chosen between two visits, and names what a visit trains on:

=============  ====================================================================
split          examples
=============  ====================================================================
``train``      the client's own rows
``synthetic``  the candidates that were chosen
``mixed``      both, shuffled together
=============  ====================================================================

Under an algorithm that asks for none, or a plain ``Trainer``, it is an `InstructionDataModule`.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from fedlight.datamodules.instructions.datamodule import InstructionDataModule
from fedlight.datamodules.synthesis.choice import HIGHEST, SCORES, Score, score_candidates
from fedlight.datamodules.synthesis.parts import made_or_read
from fedlight.datamodules.synthesis.pool import CandidatePool
from fedlight.datamodules.synthesis.record import Part, SynthesisRecord
from fedlight.datamodules.synthesis.report import TOO_LONG, metrics, said
from fedlight.datamodules.synthesis.synthesis import SURVIVED, Synthesis
from fedlight.devices.shape import BatchShape
from fedlight.evaluation.instruction_scores import best
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.federation.candidates import MIXED, SYNTHETIC
from fedlight.federation.client import Visit
from fedlight.support.seeding import derive_seed


class SyntheticInstructionDataModule(InstructionDataModule):
    """Each client's own rows, and in each round what was made for it.

    Batches of a visit are drawn when it begins, so the loader must run in this process. A batch has ``weights``,
    ``(batch,)`` float, where a candidate in it has another weight than 1.

    Args:
        source: where the clients' rows are; see `fedlight.datamodules.rows.rows`.
        synthesis: how candidates are made, for example ``SelfGeneration``.
        keep: so many candidates of a client are chosen, >= 1; None: all. A synthesis that leaves no choice keeps all.
        score: by what: ``ifs`` (lowest), ``ppl`` (lowest), ``ifd`` (highest) or ``random``; see
            `fedlight.evaluation.instruction_scores`.
        synthesis_folder: where the candidates of each round are written and looked for, see `SynthesisRecord`. None: the
            folder ``synthetic`` in the trainer's ``default_root_dir``.
        kwargs: further arguments of `InstructionDataModule`.

    Raises:
        ValueError: a setting is out of range, or ``num_workers`` is not 0.
    """

    def __init__(
        self,
        source: str,
        synthesis: Synthesis,
        keep: int | None = 16,
        score: Score = "ifs",
        synthesis_folder: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(source, **kwargs)
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep} must be at least 1, or null for all candidates")
        if score not in SCORES:
            raise ValueError(f"score={score!r} does not exist: choose from {', '.join(SCORES)}")
        if self.num_workers:
            raise ValueError(
                f"num_workers={self.num_workers}: other processes draw batches before a client has chosen what is in them. "
                "Set num_workers to 0."
            )
        self.synthesis, self.score, self.synthesis_folder = synthesis, score, synthesis_folder
        self.keep = keep if synthesis.chooses else None
        self._own: Any = None
        self._pool: CandidatePool | None = None
        self._round_idx: int | None = None
        self._parts: list[Part] = []
        self._not_finite: Counter[str] = Counter()

    # What an algorithm asks for: fedlight.federation.candidates.SynthesizesData

    def synthesize(self, round_idx: int, client_ids: Sequence[str], module: nn.Module) -> None:
        """Makes candidates for these clients, or reads them; see `SynthesizesData`.

        Raises:
            TypeError: the module writes no texts.
            OSError: nothing can be written to the folder.
        """
        if round_idx != self._round_idx or self._pool is None:
            self.reset_synthesis()
            self._round_idx, self._own = round_idx, self.train_set
            self._pool = CandidatePool(self._own, self.tokenizer, self.template, self.max_tokens)
        others = [one for one in self._parts if one.clients != list(client_ids)]
        rows = {client: self.client_rows[client] for client in client_ids}
        part = made_or_read(
            self.synthesis, rows, self.template, module, self.seed, round_idx, self._record(), others
        )
        self._parts = [*others, part]
        self._pool.put(part.candidates)
        sizes = {client: len(self._pool.candidates[client]) for client in part.clients}
        rank_zero_info(said(round_idx, sizes, self._counts(part), part.notes))
        self._stand_by(part.clients)

    def choose(self, client_id: str, module: nn.Module) -> None:
        """Scores a client's candidates and keeps the best; see `SynthesizesData`.

        A score that is not finite never wins. Where fewer than ``keep`` are finite, the client trains on fewer examples,
        more often; where none is, on the first ones.
        """
        wanted = self.num_synthetic(client_id)
        if self._pool is None or wanted == len(self._pool.candidates.get(client_id, [])):
            return
        assert isinstance(module, AnswersPrompts)  # synthesize has seen it
        candidates = self._pool.candidates[client_id]
        seed = derive_seed(self.seed, "choice", self._round_idx or 0, client_id)
        scores = score_candidates(self.score, candidates, self.template, module, seed)
        self._not_finite[client_id] = int((~np.isfinite(scores)).sum())
        if self._not_finite[client_id]:
            rank_zero_info(
                f"client {client_id}: {self._not_finite[client_id]} of {len(scores)} candidates have no finite {self.score}"
            )
        chosen = best(scores, wanted, highest=self.score in HIGHEST)
        self._take(client_id, np.sort(chosen) if len(chosen) else np.arange(wanted))

    def num_synthetic(self, client_id: str) -> int:
        """How many examples `choose` leaves, or will leave; 0 for a client without candidates."""
        made = 0 if self._pool is None else len(self._pool.candidates.get(client_id, []))
        return made if self.keep is None else min(self.keep, made)

    def synthesis_metrics(self) -> dict[str, float]:
        """What was tried, what survived, what was dropped and why, over all clients of the last such round."""
        counts: Counter[str] = Counter()
        notes: Counter[str] = Counter()
        for part in self._parts:
            counts.update(self._counts(part))
            notes.update(part.notes)
        notes["scores_not_finite"] = self._not_finite.total()
        return metrics(counts, notes)

    def reset_synthesis(self) -> None:
        """Forgets all candidates."""
        if self._pool is not None:
            self._show(self._own)
            self.plan.further.clear()
        self._pool, self._own, self._round_idx, self._parts = None, None, None, []
        self._not_finite.clear()

    # What the loop and the loader ask for

    def num_batches(self, client_id: str, split: str = "train") -> int:
        """Batches in one pass; 0 over candidates where there are none."""
        if split not in (SYNTHETIC, MIXED):
            return super().num_batches(client_id, split)
        own = len(self.client_indices[client_id]) if split == MIXED else 0
        examples = own + self.num_synthetic(client_id)
        return max(1, examples // self.batch_size) if examples else 0

    def batch_shapes(self, visit: Visit, round_idx: int) -> list[BatchShape]:
        """How large each batch of a visit is; before the candidates are chosen, how large it is at most."""
        indices = self._candidates_of(visit.client_id)
        if (visit.client_id, visit.split) in self.plan.further or visit.split == "train" or not len(indices):
            return super().batch_shapes(visit, round_idx)
        own = self.client_indices[visit.client_id] if visit.split == MIXED else indices[:0]
        size = min(self.batch_size, len(own) + self.num_synthetic(visit.client_id))
        indices = np.concatenate([own, indices])
        assert self.train_lengths is not None
        assert self.train_labelled is not None
        labelled = int(np.sort(self.train_labelled[indices])[-size:].sum())
        return [BatchShape(size, int(self.train_lengths[indices].max()), labelled)] * visit.num_batches

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """An sft batch, with ``weights`` where a candidate's is not 1."""
        batch = super().collate(examples)
        weights = [example.get("weight", 1.0) for example in examples]
        if any(weight != 1 for weight in weights):
            batch["weights"] = torch.tensor(weights, dtype=torch.float32)
        return batch

    def _counts(self, part: Part) -> Counter[str]:
        """Of what was made, with what turned out too long."""
        assert self._pool is not None
        too_long = sum(self._pool.too_long[client] for client in part.clients)
        counts = Counter(part.counts)
        counts.update({TOO_LONG: too_long, SURVIVED: -too_long})
        return counts

    def _record(self) -> SynthesisRecord | None:
        if self.synthesis_folder is not None:
            return SynthesisRecord(self.synthesis_folder)
        if self.trainer is None:  # set up by hand: nobody said where
            return None
        return SynthesisRecord(Path(self.trainer.default_root_dir) / "synthetic")

    def _stand_by(self, client_ids: Sequence[str]) -> None:
        """Makes the candidates part of the training set; where there is no choice, all of them are chosen."""
        assert self._pool is not None
        self._show(self._pool.examples)
        for client in client_ids:
            for split in (SYNTHETIC, MIXED):
                self.plan.further.pop((client, split), None)
            if self.num_synthetic(client) == len(self._pool.candidates[client]):
                self._take(client, np.arange(self.num_synthetic(client)))

    def _take(self, client_id: str, chosen: np.ndarray) -> None:
        indices = self._candidates_of(client_id)[chosen]
        if len(indices):
            self.plan.further[client_id, SYNTHETIC] = indices
        self.plan.further[client_id, MIXED] = np.concatenate([self.client_indices[client_id], indices])

    def _candidates_of(self, client_id: str) -> np.ndarray:
        nothing = np.empty(0, np.int64)
        return nothing if self._pool is None else self._pool.positions.get(client_id, nothing)

    def _show(self, examples: Any) -> None:
        """Makes these the training set."""
        self.train_set, self.train_lengths, self.train_labelled = (
            examples,
            examples.lengths,
            examples.labelled,
        )
        self.plan.lengths = examples.lengths if self.bucket else None
