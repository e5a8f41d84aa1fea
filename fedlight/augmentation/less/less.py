"""LESS: each client gets the public rows that would change the model most like the client's own rows.

M. Xia et al., "LESS: Selecting Influential Data for Targeted Instruction Tuning", ICML 2024,
https://arxiv.org/abs/2402.04333. A LoRA adapter is warmed up on a few of the public rows. At the end of each epoch i, with
mean learning rate lr_i, step_i(z) is the projected step of Adam that public row z would cause, and gradient_i(c) the mean of
the projected gradients of client c's rows (eq. 3, with one subtask for each client, as in Z. Wang et al., FedDCA,
https://arxiv.org/abs/2409.20135):

    score(z, c) = sum_i lr_i cos(step_i(z), gradient_i(c)) / sum_i lr_i.

In a federation the server warms up and takes the gradients of public rows; a client sends one vector for each epoch.
Deviation: the projection is sparse, see `fedlight.augmentation.less.features`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info

from fedlight.augmentation.less.example_gradients import ExampleGradients, check_way
from fedlight.augmentation.less.scores import (
    Features,
    PaddedExamples,
    ScoredBlocks,
    find_blocks,
    influence_scores,
)
from fedlight.augmentation.less.warm_up import WarmUp
from fedlight.datamodules.federated.rounds import PooledSampler
from fedlight.datamodules.instructions.augmentation import Added, Augmentation
from fedlight.datamodules.text.encoding import encode_responses
from fedlight.datamodules.text.examples import ResponseExamples
from fedlight.datamodules.text.templates import Template
from fedlight.datamodules.text.tokens import pad_id
from fedlight.devices import hardware
from fedlight.modules.language.adapters import Lora
from fedlight.modules.sft import SFTModule
from fedlight.pretrained.hub import load_tokenizer
from fedlight.support.checks import refuse_below
from fedlight.support.needs import ReadsModel
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields


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
        """Return the score of every candidate for every client, ``(candidates, clients)``."""
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
        """Return the rows that fit; their examples keep their indices among all rows."""
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
