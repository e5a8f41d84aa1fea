"""Instructions by client, with candidates that each client generates for itself in each round.

Training data of FewFedPIT and its relatives: Zhang et al., "FewFedPIT: Towards Privacy-preserving and Few-shot Federated
Instruction Tuning", https://arxiv.org/abs/2403.06131. An algorithm requests candidates before a round is planned, has them
selected between two visits, and names the data of a visit:

=============  ====================================================================
split          examples
=============  ====================================================================
``train``      the client's own rows
``synthetic``  the selected candidates
``mixed``      both, shuffled together
=============  ====================================================================

Section 3.3: the model that a client has trained on its own examples scores the global model's texts, since with the global
model's own scores training collapsed. Under an algorithm that requests no candidates, or a plain ``Trainer``, this is an
`InstructionDataModule`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from fedlight.datamodules.federated.rounds import batches_in_pass
from fedlight.datamodules.instructions.datamodule import InstructionDataModule
from fedlight.datamodules.rows.given import Source
from fedlight.datamodules.synthesis.record import Making, Part, SynthesisRecord
from fedlight.datamodules.synthesis.synthesis import SURVIVED, TRIED, Candidate, CandidatePool, Synthesis
from fedlight.datamodules.text.templates import Template
from fedlight.devices.shape import BatchShape
from fedlight.evaluation.instruction_scores import best, ifs, mean_losses, ppl
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.federation.algorithms.self_made.candidates import MIXED, SYNTHETIC
from fedlight.federation.client import State, Visit
from fedlight.processes.work import for_each
from fedlight.support.checks import refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.words import count_noun

TOO_LONG = "too_long"  # counts candidates that do not fit into ``max_tokens`` with their prompt
Score = Literal["ifs", "ppl", "ifd", "random"]


class SyntheticInstructionDataModule(InstructionDataModule):
    """Each client's own rows, and the candidates that were generated for it in the present round.

    Batches of a visit are drawn when it begins, so the loader must run in this process. A batch has ``weights``,
    ``(batch,)`` float, if a candidate in it has another weight than 1.

    Args:
        source: source of the clients' rows; see `fedlight.datamodules.rows.rows`.
        synthesis: generator of candidates, for example ``SelfGeneration``.
        keep: number of candidates to select for each client, >= 1; None: all. A synthesis with ``chooses=False`` keeps all.
        score: score of selection: ``ifs`` (lowest), ``ppl`` (lowest), ``ifd`` (highest) or ``random``; see
            `fedlight.evaluation.instruction_scores`.
        synthesis_folder: folder of the candidates of each round, see `SynthesisRecord`. None: the folder ``synthetic`` in
            the trainer's ``default_root_dir``.
        kwargs: further arguments of `InstructionDataModule`.

    Raises:
        ValueError: a setting is out of range, or ``num_workers`` is not 0.
        TypeError: when candidates are made, the module generates no text.
        OSError: then, the folder cannot be written.
    """

    def __init__(
        self,
        source: Source,
        synthesis: Synthesis,
        keep: int | None = 16,
        score: Score = "ifs",
        synthesis_folder: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(source, **kwargs)
        refuse_below(1, keep=keep)
        if self.num_workers:
            raise ValueError(
                f"num_workers={self.num_workers}: other processes draw batches before a client's candidates are selected: "
                "set num_workers to 0"
            )
        self.synthesis, self.score, self.synthesis_folder = synthesis, score, synthesis_folder
        self.keep = keep if synthesis.chooses else None
        self._own: Any = None
        self._pool: CandidatePool | None = None  # of the present round
        self._round_idx: int | None = None
        self._parts: list[Part] = []
        self._not_finite: Counter[str] = Counter()
        self._scores: dict[str, list[float]] = {}

    # Interface for algorithms: fedlight.federation.protocols.SynthesizesData and those after it

    def synthesize(self, round_idx: int, client_ids: Sequence[str], module: nn.Module) -> None:
        making = self._begin_synthesis(round_idx, client_ids, module)
        part = making.by_module({client: self.client_rows[client] for client in client_ids})
        self._put([*making.others, part], [part])

    def synthesize_by_own_models(
        self,
        round_idx: int,
        states: Mapping[str, State],
        module: nn.Module,
        holding: Callable[[State], AbstractContextManager[None]],
    ) -> None:
        making = self._begin_synthesis(round_idx, list(states), module)
        parts = making.by_own_models({client: self.client_rows[client] for client in states}, states, holding)
        self._put([*making.others, *parts], parts)

    def _begin_synthesis(self, round_idx: int, client_ids: Sequence[str], module: nn.Module) -> Making:
        """Forget the candidates of another round, and return how to make those of some clients in this one."""
        if round_idx != self._round_idx or self._pool is None:
            self.reset_synthesis()
            self._round_idx, self._own = round_idx, self.train_set
            self._pool = CandidatePool(self._own, self.tokenizer, self.template, self.max_tokens)
        folder = self._choose_folder(self.synthesis_folder, "synthetic")
        record = None if folder is None else SynthesisRecord(folder)
        others = [part for part in self._parts if not set(part.clients) <= set(client_ids)]
        return Making(self.synthesis, self.template, module, self.seed, round_idx, record, others)

    def _put(self, parts: Sequence[Part], new: Sequence[Part]) -> None:
        """Take all parts of a round, the new ones among them."""
        assert self._pool is not None
        self._parts = list(parts)
        for part in new:
            self._pool.put(part.candidates)
            sizes = {client: len(self._pool.candidates[client]) for client in part.clients}
            rank_zero_info(_describe(self._round_idx or 0, sizes, self._count(part), part.notes))
            self._add_candidates(part.clients)

    def choose(self, client_id: str, module: nn.Module) -> None:
        """Score a client's candidates and keep the best; see `SynthesizesData`.

        A candidate without a finite score is never selected. With fewer than ``keep`` finite scores the client trains on
        fewer examples more often; without any it trains on its first candidates.
        """
        if not self._leaves_some_out(client_id):
            return
        known = self._scores.pop(client_id, None)  # of score_together
        scores = np.array(self._score(client_id, module) if known is None else known)
        wanted = self.num_synthetic(client_id)
        self._not_finite[client_id] = int((~np.isfinite(scores)).sum())
        if self._not_finite[client_id]:
            rank_zero_info(
                f"client {client_id}: {self._not_finite[client_id]} of {len(scores)} candidates have no finite {self.score}"
            )
        chosen = best(scores, wanted, highest=self.score == "ifd")  # ifs and ppl: the lowest
        self._select(client_id, np.sort(chosen) if len(chosen) else np.arange(wanted))

    def score_together(self, client_ids: Sequence[str], module: nn.Module) -> None:
        choosing = [client for client in client_ids if self._leaves_some_out(client)]
        scores = for_each(lambda client: self._score(client, module), choosing)
        self._scores = dict(zip(choosing, scores, strict=True))

    def num_synthetic(self, client_id: str) -> int:
        made = 0 if self._pool is None else len(self._pool.candidates.get(client_id, []))
        return made if self.keep is None else min(self.keep, made)

    def synthesis_metrics(self) -> dict[str, float]:
        """Return counts of tried, surviving and dropped candidates over all clients of the last round with candidates."""
        counts: Counter[str] = Counter()
        notes: Counter[str] = Counter()
        for part in self._parts:
            counts.update(self._count(part))
            notes.update(part.notes)
        notes["scores_not_finite"] = self._not_finite.total()
        dropped = {
            f"dropped/{name}": value for name, value in counts.items() if name not in (TRIED, SURVIVED)
        }
        named = {TRIED: counts[TRIED], SURVIVED: counts[SURVIVED], **dropped, **notes}
        return {name: float(value) for name, value in named.items()}

    def choices_made(self) -> dict[str, Any]:
        """Return the number of candidates without a finite score, by client, where `choose` has scored some."""
        return dict(self._not_finite)

    def add_choices(self, choices: Mapping[str, Any]) -> None:
        for client, number in choices.items():
            self._not_finite[client] = number

    def reset_synthesis(self) -> None:
        if self._pool is not None:
            self._set_train_set(self._own)
            self.plan.further.clear()
        self._pool, self._own, self._round_idx, self._parts = None, None, None, []
        self._not_finite.clear()
        self._scores.clear()

    # Interface for the loop and the loader

    def draw_by_lot(self) -> None:
        """Raise ValueError: candidates are made of a client's rows, and nothing hides which."""
        raise ValueError(
            f"DPSGD protects training alone, and {type(self).__name__} makes examples of clients' rows: take "
            "InstructionDataModule, with an algorithm such as FedAvg"
        )

    def num_batches(self, client_id: str, split: str = "train") -> int:
        """Return the number of batches in one pass; 0 for ``synthetic`` without candidates."""
        if split not in (SYNTHETIC, MIXED):
            return super().num_batches(client_id, split)
        num_own = len(self.client_indices[client_id]) if split == MIXED else 0
        examples = num_own + self.num_synthetic(client_id)
        return batches_in_pass(examples, self.batch_size) if examples else 0

    def batch_shapes(self, visit: Visit, round_idx: int) -> list[BatchShape]:
        """Return the shape of each batch of a visit; before candidates are selected, an upper bound."""
        indices = self._find_positions(visit.client_id)
        if (visit.client_id, visit.split) in self.plan.further or visit.split == "train" or not len(indices):
            return super().batch_shapes(visit, round_idx)
        own_indices = self.client_indices[visit.client_id] if visit.split == MIXED else indices[:0]
        size = min(self.batch_size, len(own_indices) + self.num_synthetic(visit.client_id))
        indices = np.concatenate([own_indices, indices])
        assert self.train_lengths is not None
        assert self.train_labelled is not None
        labelled = int(np.sort(self.train_labelled[indices])[-size:].sum())  # most that a batch can have
        return [BatchShape(size, int(self.train_lengths[indices].max()), labelled)] * visit.num_batches

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Return an sft batch, with ``weights`` if a candidate's weight is not 1."""
        batch = super().collate(examples)
        weights = [example.get("weight", 1.0) for example in examples]
        if any(weight != 1 for weight in weights):
            batch["weights"] = torch.tensor(weights, dtype=torch.float32)
        return batch

    def _leaves_some_out(self, client_id: str) -> bool:
        """Return whether a client has more candidates than it keeps."""
        made = 0 if self._pool is None else len(self._pool.candidates.get(client_id, []))
        return self.num_synthetic(client_id) < made

    def _score(self, client_id: str, module: nn.Module) -> list[float]:
        assert isinstance(module, AnswersPrompts)  # checked by synthesize
        assert self._pool is not None
        seed = derive_seed(self.seed, "choice", self._round_idx or 0, client_id)
        candidates = self._pool.candidates[client_id]
        return score_candidates(self.score, candidates, self.template, module, seed).tolist()

    def _count(self, part: Part) -> Counter[str]:
        """Return the part's counts, with too long candidates moved from survived to ``too_long``."""
        assert self._pool is not None
        too_long = sum(self._pool.too_long[client] for client in part.clients)
        counts = Counter(part.counts)
        counts.update({TOO_LONG: too_long, SURVIVED: -too_long})
        return counts

    def _add_candidates(self, client_ids: Sequence[str]) -> None:
        """Add the candidates to the training set; select all of them if a client has no more than it keeps."""
        assert self._pool is not None
        self._set_train_set(self._pool)
        for client in client_ids:
            for split in (SYNTHETIC, MIXED):
                self.plan.further.pop((client, split), None)  # of candidates that were replaced
            if self.num_synthetic(client) == len(self._pool.candidates[client]):
                self._select(client, np.arange(self.num_synthetic(client)))

    def _select(self, client_id: str, chosen: np.ndarray) -> None:
        indices = self._find_positions(client_id)[chosen]
        if len(indices):
            self.plan.further[client_id, SYNTHETIC] = indices
        self.plan.further[client_id, MIXED] = np.concatenate([self.client_indices[client_id], indices])

    def _find_positions(self, client_id: str) -> np.ndarray:
        """Return the candidates' positions in the training set."""
        nothing = np.empty(0, np.int64)
        return nothing if self._pool is None else self._pool.positions.get(client_id, nothing)

    def _set_train_set(self, examples: Any) -> None:
        self.train_set = examples
        self.train_lengths, self.train_labelled = examples.lengths, examples.labelled
        self.plan.lengths = examples.lengths


def score_candidates(
    score: Score, candidates: Sequence[Candidate], template: Template, model: AnswersPrompts, seed: int
) -> np.ndarray:
    """Return scores ``(candidates,)`` by one call of the model.

    ``ifs`` and ``ifd`` use the loss of the response after the prompt and without it, ``ppl`` the loss after the prompt,
    ``random`` only the seed. The response follows the prompt as in training, without the end token.
    """
    if score == "random":
        return np.random.default_rng(seed).random(len(candidates))
    prompts = [template.render(candidate.fields).text for candidate in candidates]
    responses = [template.continuation(candidate.fields["response"]) for candidate in candidates]
    alone = [] if score == "ppl" else [responses]  # one empty prompt with all responses as its choices
    scored = model.log_likelihoods([*prompts, *("" for _ in alone)], [[text] for text in responses] + alone)
    conditional = mean_losses([likelihood for (likelihood,) in scored[: len(candidates)]])  # [candidates]
    if score == "ppl":
        return ppl(conditional)
    return ifs(conditional, mean_losses(scored[-1]))


def _describe(round_idx: int, sizes: Mapping[str, int], counts: Counter[str], notes: Counter[str]) -> str:
    """Return one line about the candidates of a round, with ``sizes``: client -> number of its candidates.

    Examples:
        >>> counts = Counter(tried=4, survived=1, refusal=2, near_example=1)
        >>> _describe(0, {"a": 1, "b": 0}, counts, Counter(fewer_demonstrations=2))
        'round 1: 2 clients made 1 candidate in 4 tries (dropped: 2 refusal, 1 near example; 2 fewer demonstrations);
         1 client has none'
    """
    dropped = [(name, value) for name, value in counts.most_common() if name not in (TRIED, SURVIVED)]
    reasons = [f"{value:,} {name.replace('_', ' ')}" for name, value in dropped if value]
    others = [f"; {value:,} {name.replace('_', ' ')}" for name, value in notes.items() if value]
    made = f"{count_noun(len(sizes), 'client')} made {count_noun(counts[SURVIVED], 'candidate')} in {counts[TRIED]:,} tries"
    text = f"round {round_idx + 1}: {made} (dropped: {', '.join(reasons) or 'none'}{''.join(others)})"
    without = sum(not size for size in sizes.values())
    verb = "has" if without == 1 else "have"
    return f"{text}; {count_noun(without, 'client')} {verb} none" if without else text
