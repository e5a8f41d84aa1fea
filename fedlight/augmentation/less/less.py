"""LESS: each client gets the public rows that would change the model most like the client's own rows.

M. Xia et al., "LESS: Selecting Influential Data for Targeted Instruction Tuning", ICML 2024,
https://arxiv.org/abs/2402.04333. A LoRA adapter is warmed up on a few of the public rows. At the end of each epoch i, with
mean learning rate lr_i, step_i(z) is the projected step of Adam that public row z would cause, and gradient_i(c) the mean of
the projected gradients of client c's rows (eq. 3, with one subtask for each client, as in Z. Wang et al., FedDCA,
https://arxiv.org/abs/2409.20135):

    score(z, c) = sum_i lr_i cos(step_i(z), gradient_i(c)) / sum_i lr_i.

In a federation the server warms up and takes the gradients of public rows; a client sends one vector for each epoch.
Deviation: the projection is sparse, see `fedlight.augmentation.less.features`.

The features of public rows are compared at once and not kept: memory holds one number per public row and client (400,000
rows and 10 clients: 32 MB). Scores are written to disk in blocks of rows, so that a killed run can be resumed. The files lie
in ``FOLDER/KEY/`` with a key of settings, seed and texts, so that several runs may share the folder.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedlight.augmentation.less.example_gradients import ExampleGradients, check_way
from fedlight.augmentation.less.features import Moments, RandomProjection, gradient_features, influence
from fedlight.augmentation.less.warm_up import Epoch, WarmUp, warm_up
from fedlight.datamodules.federated.rounds import PooledSampler
from fedlight.datamodules.instructions.augmentation import Added, Augmentation
from fedlight.datamodules.instructions.augmentation_record import digest_rows
from fedlight.datamodules.text.encoding import encode_responses
from fedlight.datamodules.text.examples import ResponseExamples, collate_responses
from fedlight.datamodules.text.templates import Template
from fedlight.datamodules.text.tokens import pad_id
from fedlight.devices import hardware
from fedlight.modules.language.adapters import Lora, trained_parameters
from fedlight.modules.sft import SFTModule
from fedlight.pretrained.hub import load_tokenizer
from fedlight.processes.work import for_each, is_first, once
from fedlight.support.checks import refuse_below
from fedlight.support.console import progress_bar
from fedlight.support.files import read_bytes, sealed_bytes, unsealed_bytes, write_whole
from fedlight.support.needs import ReadsModel
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields

BLOCK = 1000
"""Rows whose scores are kept in one file."""


class ScoredBlocks:
    """Files of scores by epoch and block of rows.

    Args:
        folder: folder of one run; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def read(self, epoch: int, block: int, shape: tuple[int, int]) -> Tensor | None:
        """Return the scores of a block, or None if the file is missing or damaged."""
        if self.folder is None:
            return None
        try:
            scores: np.ndarray = np.load(io.BytesIO(unsealed_bytes(read_bytes(self._file(epoch, block)))))
        except (OSError, ValueError):
            return None
        return torch.from_numpy(scores) if scores.shape == shape else None

    def write(self, epoch: int, block: int, scores: np.ndarray) -> None:
        """Write the scores ``(rows, clients)`` of a block; a reader sees all of them or none."""
        if self.folder is None:
            return
        file = io.BytesIO()
        np.save(file, scores)
        write_whole(self._file(epoch, block), sealed_bytes(file.getvalue()))

    def _file(self, epoch: int, block: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{epoch}-{block}.npy"


def find_blocks(
    folder: str | None,
    settings: Mapping[str, object],
    clients: Mapping[str, Sequence[Fields]],
    public: Sequence[Fields],
    seed: int,
) -> ScoredBlocks:
    """Return the blocks of a run in the folder of all runs, where its key follows from all other arguments."""
    if folder is None:
        return ScoredBlocks(None)
    texts = [(client, digest_rows(rows)) for client, rows in clients.items()]
    key = json.dumps([settings, seed, texts, digest_rows(public)], sort_keys=True)
    return ScoredBlocks(Path(folder).expanduser() / hashlib.blake2b(key.encode(), digest_size=8).hexdigest())


class PaddedExamples:
    """Examples as batches on a device, padded on the right with a token."""

    def __init__(self, examples: ResponseExamples, padding: int, device: torch.device) -> None:
        self.examples, self.padding, self.device = examples, padding, device

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.examples)

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """Return the examples of these indices as a batch on the device."""
        batch = collate_responses([self.examples[index] for index in indices], self.padding)
        return {name: part.to(self.device) for name, part in batch.items()}

    def longest_first(self) -> np.ndarray:
        """Return all indices, the longest example first."""
        return np.argsort(-self.examples.lengths, kind="stable")  # too large a batch fails at once


class Features:
    """Gradient features of examples by the trained weights of a configured module with one adapter.

    Gradients of ``batch_size`` examples are in memory at once.
    """

    def __init__(self, module: SFTModule, dimension: int, batch_size: int, way: str, seed: int) -> None:
        self.module, self.batch_size, self.way = module, batch_size, way
        weights = trained_parameters(module)
        sizes = {name: weight.numel() for name, weight in weights.items()}
        self.project = RandomProjection(sizes, dimension, seed, next(iter(weights.values())).device)

    def batches(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return these indices in batches."""
        return [indices[start : start + self.batch_size] for start in range(0, len(indices), self.batch_size)]

    def compute(self, examples: PaddedExamples, batch: np.ndarray, moments: Moments | None = None) -> Tensor:
        """Return the features of a batch of indices, ``(batch, dimension)``; see `gradient_features`."""
        return gradient_features(self.module, examples.batch(batch), self.project, moments, self.way)

    def mean(self, examples: PaddedExamples) -> Tensor:
        """Return the mean of the plain gradients' features, ``(dimension,)``."""
        parts = [self.compute(examples, batch).sum(dim=0) for batch in self.batches(examples.longest_first())]
        return torch.stack(parts).sum(dim=0) / len(examples)


def _compute(
    features: Features, candidates: PaddedExamples, indices: np.ndarray, moments: Moments, means: Tensor
) -> Tensor:
    """Return the scores of these candidates, ``(candidates, targets)`` fp64; several processes share the batches."""

    def score(batch: np.ndarray) -> Tensor:
        return influence(features.compute(candidates, batch, moments), means).cpu().double()

    return torch.cat(for_each(score, features.batches(indices)))


def influence_scores(
    features: Features,
    candidates: PaddedExamples,
    targets: Sequence[PaddedExamples],
    epochs: Sequence[Sequence[Sequence[int]]],
    lr: float,
    blocks: ScoredBlocks,
) -> tuple[np.ndarray, list[Epoch]]:
    """Warm the module up on some of the candidates and score all of them after each epoch.

    The scores, ``(candidates, targets)`` fp64, are cosines weighted by the epochs' mean learning rates; ``epochs`` has the
    batches of each epoch as indices of candidates, and ``blocks`` keeps known scores. Of several processes each warms up its
    module, and they share the gradients.
    """
    scores, finished, order = np.zeros((len(candidates), len(targets))), [], candidates.longest_first()
    with progress_bar("LESS: gradients of public rows", len(epochs) * len(candidates)) as advance:
        for number, epoch in enumerate(warm_up(features.module, epochs, candidates.batch, lr)):
            finished.append(epoch)
            found_means = for_each(lambda examples: features.mean(examples).cpu(), targets)
            means = torch.stack(found_means).to(candidates.device)
            for block, start in enumerate(range(0, len(order), BLOCK)):
                indices = order[start : start + BLOCK]
                # One process looks for all.
                shape = len(indices), len(targets)
                block_scores: Tensor | None = once(partial(blocks.read, number, block, shape))
                if block_scores is None:
                    block_scores = _compute(features, candidates, indices, epoch.moments, means)
                    if is_first():
                        blocks.write(number, block, block_scores.numpy())  # each has all scores
                scores[indices] += epoch.mean_lr * block_scores.numpy()  # lr_i cos(step_i, gradient_i)
                advance(len(indices))
    return scores / sum(epoch.mean_lr for epoch in finished), finished


class LESS(ReadsModel, Augmentation):
    """Selection of public rows by their influence on the client's own rows, which is also their score.

    The defaults are those of the paper and its code. ``warmup.epochs`` gradients of every public row cost as much as
    training on the whole public set for as many epochs. A client without a row that fits into ``max_tokens`` gets nothing.

    Args:
        model: hub name, folder or ``"toy"`` of the model whose gradients are taken, usually the one that clients train.
        number: rows for each client, >= 1.
        template: like the datamodule's, a name or a text with slots; see `fedlight.datamodules.text.templates`.
        max_tokens: most tokens of prompt and response together; a longer prompt is cut, and a public row whose response
            does not fit is not selected.
        base: ``plain``, ``int8`` or ``nf4``; the last two need ``gradients.way="layers"``.
        dtype: number type of the base; see `LanguageModule`, as for ``lora``.
        lora: adapter that is warmed up and differentiated.
        warmup: rows, epochs and learning rate of the warm-up.
        dimension: numbers of a projected gradient, >= 1.
        gradients: how gradients of single rows are computed, which changes none beyond rounding.
        device: name of torch; ``auto`` is the GPU if there is one, else the CPU.
        cache: folder for scores, so that a killed run can resume; None: beside the rows that a datamodule records.

    Raises:
        ValueError: a setting is out of range or misspelt.
    """

    without_effect = ("gradients", "device", "cache")  # beyond rounding

    def __init__(
        self,
        model: str,
        number: int,
        template: str = "alpaca",
        max_tokens: int = 2048,
        base: str = "plain",
        dtype: str = "auto",
        lora: Lora = Lora(128, 512, 0.1, r".*\.[qkvo]_proj"),
        warmup: WarmUp = WarmUp(),
        dimension: int = 8192,
        gradients: ExampleGradients = ExampleGradients(),
        device: str = "auto",
        cache: str | None = None,
    ) -> None:
        super().__init__(number)
        refuse_below(1, max_tokens=max_tokens, dimension=dimension)
        check_way(gradients.way, base)
        hardware.choose_device(device)  # refuses one that is not there
        self.model, self.template, self.max_tokens = model, template, max_tokens
        self.base, self.dtype, self.lora, self.warmup = base, dtype, lora, warmup
        self.dimension, self.gradients, self.device, self.cache = dimension, gradients, device, cache
        Template.named(template)  # refuses an unknown name
        self._new_module(seed=0)  # refuses wrong settings before anything is read
        self._record: dict[str, object] = {}

    def keep_in(self, folder: Path) -> None:
        self.cache = self.cache or str(folder / "less")

    def augment(
        self, clients: Mapping[str, Sequence[Fields]], public: Sequence[Fields], seed: int
    ) -> dict[str, list[Added]]:
        """Return the selected rows; raise ValueError if no public row, or no client's row, fits into ``max_tokens``."""
        added: dict[str, list[Added]] = {client: [] for client in clients}
        if not public:
            return added
        device, tokenizer = hardware.choose_device(self.device), load_tokenizer(self.model)
        candidates = self._read(tokenizer, public, device)
        owned = {client: self._read(tokenizer, rows, device) for client, rows in clients.items()}
        targets = {client: rows for client, rows in owned.items() if len(rows)}  # others get nothing
        if not len(candidates) or not targets:
            whose = "client's row" if len(candidates) else "public row"
            raise ValueError(f"LESS: no {whose} fits into max_tokens={self.max_tokens}: raise it")
        # Scores do not depend on the number: another number finds them again.
        settings = {name: value for name, value in self.settings().items() if name != "number"}
        blocks = find_blocks(self.cache, settings, clients, public, seed)
        scores = self._score(candidates, list(targets.values()), seed, blocks)
        for column, client in enumerate(targets):
            best = np.argsort(-scores[:, column], kind="stable")[
                : self.number
            ]  # of equal scores the earlier first
            rows = candidates.examples.rows[best].tolist()
            added[client] = [
                Added(public[row], row, float(scores[example, column]))
                for example, row in zip(best, rows, strict=True)
            ]
        self._record["public_rows_too_long"] = len(public) - len(candidates)
        self._record["clients_without_rows"] = len(clients) - len(targets)
        rank_zero_info(self._summarize())
        return added

    def why_fewer(self) -> str:
        return f"too few public rows, or none of the client's own, fit into max_tokens={self.max_tokens}"

    def record(self) -> dict[str, object]:
        """Return, for the last call, losses and rates of the warm-up, bytes that a client sends, and rows left out."""
        return dict(self._record)

    def _score(
        self, candidates: PaddedExamples, targets: Sequence[PaddedExamples], seed: int, blocks: ScoredBlocks
    ) -> np.ndarray:
        module = self._new_module(seed)
        with torch.device(candidates.device):
            module.configure_model()
        features = Features(module, self.dimension, self.gradients.batch_size, self.gradients.way, seed)
        epochs = self._warm_up_batches(candidates.examples.lengths, seed)
        scores, finished = influence_scores(features, candidates, targets, epochs, self.warmup.lr, blocks)
        self._record = {
            "warmup_rows": len({row for epoch in epochs for batch in epoch for row in batch}),
            "warmup_losses": [round(epoch.mean_loss, 4) for epoch in finished],
            "warmup_lrs": [epoch.mean_lr for epoch in finished],
            "adapter_weights": sum(weight.numel() for weight in module.parameters() if weight.requires_grad),
            "client_sends_bytes": 4 * self.dimension * self.warmup.epochs,  # a vector in fp32 for each epoch
        }
        return scores

    def _summarize(self) -> str:
        record = self._record
        return (
            f"LESS: warmed up on {record['warmup_rows']:,} rows, loss by epoch {record['warmup_losses']}; gradients of "
            f"{record['adapter_weights']:,} weights ({self.gradients.way}) in {self.dimension:,} numbers; left "
            f"out: {record['public_rows_too_long']:,} public rows too long, {record['clients_without_rows']:,} clients"
        )

    def _new_module(self, seed: int) -> SFTModule:
        given: dict[str, Any] = {
            "base": self.base,
            "dtype": self.dtype,
            "lora": self.lora,
            "lr": self.warmup.lr,
        }
        return SFTModule(self.model, **given, seed=derive_seed(seed, "less"))

    def _read(self, tokenizer: object, rows: Sequence[Fields], device: torch.device) -> PaddedExamples:
        responses = [row["response"] for row in rows]
        template = Template.named(self.template, rows[0] if rows else ()).for_tokenizer(tokenizer)
        encoded = encode_responses(tokenizer, template, rows, responses, self.max_tokens)
        return PaddedExamples(
            ResponseExamples(encoded, np.flatnonzero(encoded.kept)), pad_id(tokenizer), device
        )

    def _warm_up_batches(self, lengths: np.ndarray, seed: int) -> list[list[list[int]]]:
        """Return the batches of candidates of each epoch; all epochs have the same candidates."""
        seed = derive_seed(seed, "less warm-up")
        number = max(1, round(self.warmup.share * len(lengths)))
        drawn = np.random.default_rng(seed).choice(len(lengths), number, replace=False)
        sampler = PooledSampler(number, self.warmup.batch_size, seed, lengths[drawn])  # little padding
        epochs = []
        for epoch in range(self.warmup.epochs):
            sampler.set_epoch(epoch)
            epochs.append([drawn[batch].tolist() for batch in sampler])
        return epochs
