"""Projector of FedDCA*, which maps vectors of the clients' small encoder to vectors of the server's large one.

Z. Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA), 2024,
https://arxiv.org/abs/2409.20135, section 4.3 and Figure 6: Linear - ReLU - Linear, trained on the server on public
instructions with the contrastive loss of eq. 4, temperature 0.5. A batch has the vectors of both encoders of the same texts.

Deviations: the loss is the mean over the batch where eq. 4 sums; ``include_positive`` puts the positive into the
denominator, which eq. 4 leaves out. The paper gives neither the width of the hidden layer nor the optimizer: the width is
the large encoder's, and AdamW with a cosine schedule over the epochs trains it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from fedlight.evaluation.alignment import alignment
from fedlight.modules.functional import info_nce
from fedlight.modules.language.data_checks import check_batch
from fedlight.modules.language.optimizers import Optimization, OptimizedModule
from fedlight.support.checkpoint_files import check_readable
from fedlight.support.checks import check_range, refuse_below
from fedlight.support.seeding import derive_seed, own_stream
from fedlight.support.settings_record import made_of

Batch = dict[str, Tensor]
BLOCK = 65_536
"""Vectors that are projected at once."""


class ProjectorModule(OptimizedModule):
    """Module that learns to map vectors of a small encoder to those of a large one.

    A batch has ``small``, ``(batch, small_dimension)``, and ``large``, ``(batch, large_dimension)``. Validation logs
    the loss and, over all held-out texts together, ``val/cosine``, the mean cosine of a projected vector and the large
    encoder's vector of the same text, and ``val/top1`` and ``val/recall10``: how often that vector is the nearest, or among
    the ten nearest, of all.

    Args:
        small_dimension: dimension of the clients' vectors.
        large_dimension: dimension of the server's vectors.
        hidden_dimension: width of the hidden layer; None: ``large_dimension``.
        temperature: tau of eq. 4, above 0.
        include_positive: whether the denominator of eq. 4 includes the positive.
        lr: learning rate, above 0.
        optimizer: optimizer and schedule of the learning rate. An `Optimization` without a schedule is constant; a config
            that gives some of its settings keeps cosine.
        seed: seed of the initial weights.

    Raises:
        ValueError: a setting is misspelt or out of range.
    """

    data_hint = "vectors of two encoders: data=EmbeddingDataModule"
    maps = ("optimizer",)
    compares_rows = True  # the loss of a text depends on the others of its batch

    def __init__(
        self,
        small_dimension: int,
        large_dimension: int,
        hidden_dimension: int | None = None,
        temperature: float = 0.5,
        include_positive: bool = False,
        lr: float = 1e-3,
        optimizer: Optimization = Optimization(schedule="cosine"),
        seed: int = 0,
    ) -> None:
        super().__init__()
        hidden = large_dimension if hidden_dimension is None else hidden_dimension
        refuse_below(
            1, small_dimension=small_dimension, large_dimension=large_dimension, hidden_dimension=hidden
        )
        check_range("temperature", temperature, 0, float("inf"), above_low=True)
        check_range("lr", lr, 0, float("inf"), above_low=True)
        self.save_hyperparameters()
        self.save_plain(optimizer=made_of(Optimization, optimizer))
        with own_stream(derive_seed(seed, "projector")):
            self.layers = nn.Sequential(
                nn.Linear(small_dimension, hidden), nn.ReLU(), nn.Linear(hidden, large_dimension)
            )
        self._held_out: list[tuple[Tensor, Tensor]] = []

    @property
    def dimensions(self) -> tuple[int, int]:
        """Dimensions of the small and the large encoder."""
        return self.options.small_dimension, self.options.large_dimension

    def forward(self, small: Tensor) -> Tensor:
        """Return the projected vectors, ``(batch, large_dimension)``, of any length."""
        return self.layers(small)

    @torch.no_grad()
    def project(self, vectors: np.ndarray) -> np.ndarray:
        """Return unit vectors in the large encoder's space.

        Args:
            vectors: vectors of the small encoder, ``(vectors, small_dimension)``.

        Returns:
            ``(vectors, large_dimension)`` float32.

        Raises:
            ValueError: the vectors have another dimension.
        """
        expected = self.options.small_dimension
        if vectors.ndim != 2 or vectors.shape[1] != expected:
            raise ValueError(
                f"the projector takes vectors of dimension {expected} and was given {vectors.shape}: use the encoder that "
                "it was trained with"
            )
        blocks = torch.from_numpy(np.ascontiguousarray(vectors, dtype=np.float32)).split(BLOCK)
        projected = [normalize(self(block.to(self.device)), dim=1).cpu() for block in blocks]
        return torch.cat(projected).numpy()

    def example_losses(self, batch: Batch) -> Tensor:
        """Return the contrastive loss of each text, ``(batch,)``."""
        return self._compare(batch)[1]

    def _compare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the projected vectors and the loss of each text."""
        check_batch(batch, {"small": 2, "large": 2}, type(self).__name__, self.data_hint)
        projected, options = self(batch["small"]), self.options
        return projected, info_nce(projected, batch["large"], options.temperature, options.include_positive)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        projected, losses = self._compare(batch)
        self.log_means("val", {"loss": losses})
        self._held_out.append((projected.float().cpu(), batch["large"].float().cpu()))

    def on_validation_epoch_end(self) -> None:
        projected, large = (torch.cat(side).numpy() for side in zip(*self._held_out, strict=True))
        self._held_out.clear()
        for name, value in alignment(projected, large)._asdict().items():
            self.log(f"val/{name}", value, prog_bar=name == "cosine")

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, *, weights_only: bool = True, **kwargs: Any
    ) -> "ProjectorModule":
        """Return a projector from its checkpoint, on the CPU and in eval mode.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is damaged or no checkpoint of a projector.
        """
        check_readable(checkpoint_path)
        try:
            module = super().load_from_checkpoint(
                checkpoint_path, map_location="cpu", weights_only=weights_only, **kwargs
            )
        except (RuntimeError, TypeError):  # other weights, or other arguments
            raise ValueError(
                f"checkpoint {str(checkpoint_path)!r} is not one of a ProjectorModule: give one of `fedlight fit --config "
                "projector.yaml`"
            ) from None
        return module.eval()
