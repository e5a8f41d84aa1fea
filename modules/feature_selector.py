"""Selector on frozen features: small heads that give a text a utility, on vectors that an encoder has made once.

R. Bradley and M. Terry, "Rank Analysis of Incomplete Block Designs", Biometrika 1952, https://doi.org/10.2307/2334029:
``P(A before B) = exp(u(A)) / (exp(u(A)) + exp(u(B)))``, with ``u(x) = w . x`` or ``u(x) = w . tanh(V x + b)``. The loss is
the cross-entropy of FedBis (F. Wu et al., ICLR 2025, https://arxiv.org/abs/2407.03038, eq. 3) over the logits
``[u(A), u(B)]``. So a head cannot prefer a position. Several heads are the selectors of FedBiscuit. The encoder is not
trained, an addition of this library: an experiment takes seconds, and a client needs no memory for an encoder's gradients.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlight.modules.choices import log_choices, stage_accuracies
from fedlight.modules.functional import choice_loss
from fedlight.modules.language.adapter_folders import name_adapters
from fedlight.modules.language.checkpoints import check_optimizer_settings
from fedlight.modules.language.data_checks import check_batch
from fedlight.modules.language.optimizers import Optimization, OptimizedModule
from fedlight.support.checks import check_choice, check_range, refuse_below
from fedlight.support.seeding import derive_seed, own_stream
from fedlight.support.settings_record import made_of

Batch = dict[str, Tensor]
FILE = "heads.safetensors"


class Head(nn.Module):
    """Utility of a text, from its features; with ``hidden=0`` it is linear in them.

    The last layer has no bias, which would cancel in the difference of two utilities.
    """

    def __init__(self, dimension: int, hidden: int) -> None:
        super().__init__()
        self.body = nn.Linear(dimension, hidden) if hidden else nn.Identity()
        self.head = nn.Linear(hidden or dimension, 1, bias=False)
        self.bends = hidden > 0  # without a hidden layer u is linear

    def forward(self, features: Tensor) -> Tensor:
        """Return utilities ``(...)`` for features ``(..., dimension)``."""
        inner = self.body(features)
        return self.head(inner.tanh() if self.bends else inner).squeeze(dim=-1)


class FeatureSelectorModule(OptimizedModule):
    """Module that learns to choose between two texts by their frozen features.

    A batch has ``features``, ``(batch, 2, dimension)``, of A and B, and ``labels``, ``(batch,)``, 0 where A is better and 1
    where B is, as `PreferenceDataModule` with ``form="features"`` gives them. Trained are ``heads.NAME.body.*``, the hidden
    layer, and ``heads.NAME.head.*``, the last one; the names are those of the adapters; one at a time is active.

    Args:
        dimension: length of a feature vector, at least 1.
        hidden: width of the hidden layer, at least 0; 0: none, the utility is linear in the features.
        num_adapters: U, the number of heads. They start with different weights: the assignment of clients to the nearest of
            equal heads would be no choice.
        adapter: folder of `save_adapter` to start from.
        lr: learning rate, above 0.
        optimizer: optimizer and schedule of the learning rate.
        seed: seed of the initial weights.

    Raises:
        ValueError: a setting is misspelt or out of range.
    """

    data_hint = "features of two texts: data=PreferenceDataModule with view=selector and form=features"
    maps = ("optimizer",)

    def __init__(
        self,
        dimension: int = 384,
        hidden: int = 0,
        num_adapters: int = 1,
        adapter: str | None = None,
        lr: float = 0.01,
        optimizer: Optimization = Optimization(),
        seed: int = 0,
    ) -> None:
        super().__init__()
        refuse_below(1, dimension=dimension, num_adapters=num_adapters)
        refuse_below(0, hidden=hidden)
        check_range("lr", lr, 0, float("inf"), above_low=True)
        self.save_hyperparameters()
        self.save_plain(optimizer=made_of(Optimization, optimizer))
        self.heads = nn.ModuleDict()
        for index, name in enumerate(name_adapters(num_adapters)):
            with own_stream(derive_seed(seed, "head", index)):
                self.heads[name] = Head(dimension, hidden)
        self.active = self.adapter_names[0]
        self.accuracy = stage_accuracies()
        if adapter is not None:
            self._load(Path(adapter))

    @property
    def adapter_names(self) -> list[str]:
        """Names of the heads: ``["default"]``, or with several ``["adapter0", "adapter1", ...]``."""
        return list(self.heads)

    def use_adapter(self, name: str) -> None:
        """Make one head the active one: the module computes and trains with it alone.

        The others stay in the optimizer; they have no gradients, so that no optimizer moves them.

        Raises:
            ValueError: the module has no such head.
        """
        check_choice("adapter", name, self.adapter_names)
        self.active = name
        for other, head in self.heads.items():
            if other != name:
                head.zero_grad(set_to_none=True)  # a gradient of 0 would let momentum move it

    def choice_logits(self, batch: Batch) -> Tensor:
        """Return the active head's utilities of A and B, ``(batch, 2)``."""
        self._check_batch(batch)
        return self.heads[self.active](batch["features"])

    def ensemble_logits(self, batch: Batch) -> Tensor:
        """Return the utilities of A and B by each of the U heads, ``(batch, U, 2)``."""
        self._check_batch(batch)
        return torch.stack([head(batch["features"]) for head in self.heads.values()], dim=1)

    def example_losses(self, batch: Batch) -> Tensor:
        """Return the active head's cross-entropy over the two choices, ``(batch,)``."""
        return choice_loss(self.choice_logits(batch), batch["labels"])

    def validation_step(self, batch: Batch, batch_idx: int) -> Mapping[str, Tensor]:
        """Log the means and return which examples are decided correctly; see `log_choices`."""
        return log_choices(self, "val", self.ensemble_logits(batch), batch["labels"])

    def test_step(self, batch: Batch, batch_idx: int) -> Mapping[str, Tensor]:
        """Log the means and return which examples are decided correctly; see `log_choices`."""
        return log_choices(self, "test", self.ensemble_logits(batch), batch["labels"])

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return the log-probabilities of A and B, ``(batch, 2)``, or ``(batch, 2, U)`` with several heads."""
        log_probs = self.ensemble_logits(batch).log_softmax(dim=2).transpose(1, 2)
        return log_probs.squeeze(dim=2) if len(self.heads) == 1 else log_probs

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._trainer is not None and self._trainer.state.fn == "fit":
            check_optimizer_settings(checkpoint["hyper_parameters"], self.hparams)

    def save_adapter(self, folder: str | Path) -> None:
        """Write the weights of all heads into a folder, which ``adapter=`` reads."""
        from safetensors.torch import save_file

        Path(folder).mkdir(parents=True, exist_ok=True)
        weights = {name: value.contiguous() for name, value in self.heads.state_dict().items()}
        save_file(weights, Path(folder) / FILE)

    def _load(self, folder: Path) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not (folder / FILE).is_file():
            raise FileNotFoundError(
                f"adapter={str(folder)!r} has no {FILE}: give a folder that a FeatureSelectorModule has saved"
            )
        try:
            weights = load_file(folder / FILE)
        except SafetensorError as error:
            raise ValueError(f"adapter={str(folder)!r}: {FILE} is damaged ({error}): make it again") from None
        saved, expected = _described(weights), _described(self.heads.state_dict())
        if saved != expected:
            raise ValueError(
                f"adapter={str(folder)!r} has heads {saved}, and the settings make {expected}: set "
                "dimension, hidden and num_adapters as when it was saved"
            )
        self.heads.load_state_dict(weights)

    def _check_batch(self, batch: Batch) -> None:
        check_batch(batch, {"features": 3, "labels": 1}, type(self).__name__, self.data_hint)
        dimension = batch["features"].shape[2]
        if dimension != self.options.dimension:
            raise ValueError(
                f"model.dimension={self.options.dimension}, and the features of this data have {dimension} numbers: set "
                f"model.dimension={dimension}"
            )


def _described(state: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(weight.shape)}" for name, weight in sorted(state.items()))
