"""Direct preference optimization on an adapter, with the base as its own reference.

R. Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", NeurIPS 2023,
https://arxiv.org/abs/2305.18290, eq. 7. The reference is the same model with its adapter switched off, never a second
copy. Its log-probabilities are computed once per pair: over three epochs that saves two of three reference passes.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedlight.devices.quantization import FORMS
from fedlight.devices.shape import BatchShape
from fedlight.modules.functional import dpo_loss, joint_key, reward_margin, text_keys
from fedlight.modules.language import skeleton
from fedlight.modules.language.adapters import disable_adapters
from fedlight.modules.language.module import Batch
from fedlight.modules.language.optimizers import Optimization
from fedlight.modules.language.readout import response_log_probs
from fedlight.modules.pairs import PairModule, join
from fedlight.support.checks import check_range
from fedlight.support.torch_parts import eval_mode, replaced

REFERENCE_KEY = "reference_log_probs"
"""Key of the reference's log-probabilities in a checkpoint."""
SIDES = ("chosen", "rejected")


class DPOModule(PairModule):
    """Module that learns to prefer the chosen over the rejected response.

    A batch has ``chosen`` and ``rejected``, each with ``input_ids``, ``attention_mask`` and ``labels`` as
    `SFTModule` takes them. To start from a model that was tuned before, give its
    adapter with ``merge_adapter=true``: then the reference is the tuned model, as in the paper.

    Args:
        model: see `LanguageModule`.
        beta: above 0; a larger value keeps the policy closer to the reference.
        lr: learning rate.
        optimizer: optimizer and schedule of the learning rate; see `LanguageModule`. An `Optimization` without a name is
            AdamW; a config that gives some of its settings keeps RMSprop.
        kwargs: further arguments of `LanguageModule`.

    Attributes:
        base_bits: bits per weight of the base now: 16, 8 or 4, at first those of ``base``. Code that swaps the base's
            precision sets it, because the reference's log-probabilities depend on it.

    Raises:
        ValueError: a setting is misspelt or out of range.
    """

    accuracy_name = "reward_accuracy"

    def __init__(
        self,
        model: str,
        beta: float = 0.1,
        lr: float = 1e-6,
        optimizer: Optimization = Optimization("RMSprop"),
        **kwargs: Any,
    ) -> None:
        super().__init__(model, lr=lr, optimizer=optimizer, **kwargs)
        check_range("beta", beta, 0, float("inf"), above_low=True)
        self._own_bits = next(bits for bits, form in FORMS.items() if form == self.options.base)
        self.base_bits = self._own_bits
        self._reference: dict[int, list[float]] = {}
        self._is_evaluated = False
        self._shared = 0  # of these, the first ones, which other processes have

    def example_metrics(self, batch: Batch) -> dict[str, Tensor]:
        """Return loss, reward margin (beta times the margin of eq. 7) and whether it is positive, ``(batch,)`` each."""
        return self.pair_metrics(batch, self.reference_log_probs(batch))

    def example_losses(self, batch: Batch) -> Tensor:
        with replaced(self, "_is_evaluated", not self.training):
            return super().example_losses(batch)

    def evaluation(self, batch: Batch) -> dict[str, Tensor]:
        with replaced(self, "_is_evaluated", True):
            return super().evaluation(batch)

    def pair_metrics(self, batch: Batch, reference: Tensor) -> dict[str, Tensor]:
        """Return the metrics of each pair, given the reference's log-probabilities ``(batch, 2)``."""
        chosen, rejected = self.pair_log_probs(batch).unbind(dim=1)
        margin = reward_margin(chosen, rejected, *reference.unbind(dim=1))
        return {
            "loss": dpo_loss(margin, self.options.beta),
            "reward_margin": self.options.beta * margin.detach(),  # logged alone
            "reward_accuracy": (margin > 0).float(),
        }

    def pair_log_probs(self, batch: Batch) -> Tensor:
        """Return the log-probabilities of the chosen and the rejected response, ``(batch, 2)``, in one forward pass."""
        joined = join(batch["chosen"], batch["rejected"])
        log_probs, _ = response_log_probs(self.causal_lm, joined, self.shared_prefix.pairs)
        return torch.stack(log_probs.sum(dim=1).chunk(2), dim=1)  # joined: chosen first

    def reference_log_probs(self, batch: Batch) -> Tensor:
        """Return the reference's log-probabilities, ``(batch, 2)``, computed once for each pair and ``base_bits``.

        A batch rounds them in its own way. So training takes those of a pair's first training batch, whatever this process
        has evaluated before, and whoever else has the same pair under another ``index``.
        """
        keys, places = self.pair_keys(batch), batch.get("index")
        if self._is_evaluated:
            keys = [joint_key(key, *keys) for key in keys]
        elif places is not None:
            keys = [joint_key(*pair) for pair in zip(keys, places.tolist(), strict=True)]
        if self.base_bits != self._own_bits:  # a rounded base has other log-probabilities
            keys = [joint_key(key, self.base_bits) for key in keys]
        new = [row for row, key in enumerate(keys) if key not in self._reference]
        if new:
            unseen = {side: {name: part[new] for name, part in batch[side].items()} for side in SIDES}
            computed = self.reference_pass(unseen).tolist()
            self._reference.update({keys[row]: values for row, values in zip(new, computed, strict=True)})
        return torch.tensor(
            [self._reference[key] for key in keys], device=batch["chosen"]["input_ids"].device
        )

    def before_parts(self, batch: Batch) -> None:
        """Compute what is not known of the reference, of all rows, where processes train parts of them."""
        super().before_parts(batch)
        self.reference_log_probs(batch)

    def new_findings(self) -> dict[int, list[float]]:
        """Return the reference's log-probabilities since the last call; see `fedlight.callbacks.loop.ranks.ranks`."""
        return dict([*self._reference.items()][self._shared :])

    def add_findings(self, findings: Mapping[int, list[float]]) -> None:
        """Take the new log-probabilities of all processes."""
        self._reference |= findings
        self._shared = len(self._reference)

    def reference_pass(self, batch: Batch) -> Tensor:
        """Compute the reference's log-probabilities, ``(batch, 2)``."""
        with torch.no_grad(), eval_mode(self.network), disable_adapters(self.network):
            return self.pair_log_probs(batch)

    def sketch_batch(self, shape: BatchShape) -> Batch:
        shares = ((shape.responses + 1) // 2, shape.responses // 2)
        halves = [skeleton.make_responses(replace(shape, responses=share)) for share in shares]
        return dict(zip(SIDES, halves, strict=True))

    def sketch_losses(self, batch: Batch) -> Tensor:
        """Return the losses of a step on new pairs, which includes the reference's pass."""
        return self.pair_metrics(batch, self.reference_pass(batch))["loss"]

    def pair_keys(self, batch: Batch) -> list[int]:
        """Return a key of each pair's tokens and labels."""
        parts = [
            text_keys(batch[side][name], batch[side]["attention_mask"])
            for side in SIDES
            for name in ("input_ids", "labels")
        ]
        return [joint_key(*pair) for pair in zip(*parts, strict=True)]

    def batch_key(self, batch: Batch) -> int:
        return joint_key(*self.pair_keys(batch))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[REFERENCE_KEY] = {
            "keys": torch.tensor(list(self._reference), dtype=torch.int64),
            "values": torch.tensor(list(self._reference.values())),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if REFERENCE_KEY not in checkpoint:
            raise ValueError(
                "this checkpoint was not made by a DPOModule: save its adapter with save_adapter and set adapter to it"
            )
        saved = checkpoint[REFERENCE_KEY]
        self._reference = dict(zip(saved["keys"].tolist(), saved["values"].tolist(), strict=True))
        self._shared = len(self._reference)
