"""Small transformer with LoRA on a frozen base, for timing training steps."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlight.devices.cost import without_weights
from fedlight.devices.shape_run import ShapeRun


class LoraLinear(nn.Module):
    """Frozen linear layer with a trained fp32 adapter beside it, as in PEFT."""

    def __init__(self, inputs: int, outputs: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False, dtype=dtype).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, ``(..., outputs)``, in the number type of ``x``, ``(..., inputs)``."""
        adapted: Tensor = self.up(self.down(x.float()))
        base: Tensor = self.base(x)
        return base + adapted.to(x.dtype)


class Layer(nn.Module):
    """Causal attention and a feed-forward part four times as wide."""

    def __init__(self, width: int, heads: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, dtype=dtype) for _ in range(2)).requires_grad_(False)
        sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self.attend, self.out, self.widen, self.narrow = (LoraLinear(*size, rank, dtype) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(examples, tokens, width)``, as ``x`` is."""
        parts = self.attend(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()  # [examples, heads, tokens, features]
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden: Tensor = x + self.narrow(functional.gelu(self.widen(self.norms[1](x))))
        return hidden


class SmallTransformer(nn.Module):
    """Language model of random weights with trained LoRA on all layers.

    Args:
        width, layers, heads, words: shape of the model; ``heads`` divides ``width``.
        rank: rank of LoRA.
        dtype: number type of the frozen base.
    """

    def __init__(
        self, width: int, layers: int, heads: int, words: int, rank: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, dtype=dtype).requires_grad_(False)
        self.layers = nn.Sequential(*(Layer(width, heads, rank, dtype) for _ in range(layers)))
        self.head = nn.Linear(width, words, bias=False, dtype=dtype).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean loss of predicting each token of ``ids``, ``(examples, tokens + 1)``, from those before."""
        logits = self.head(self.layers(self.embedding(ids[:, :-1])))
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def step_flops(self, ids: Tensor) -> int:
        """Return the operations of a training step, counted as those of a visit are."""
        ghost, ids = without_weights(self), ids.cpu()
        with ShapeRun([*ghost.parameters(), ids]) as counted:
            ghost(ids).backward()
        return counted.flops
