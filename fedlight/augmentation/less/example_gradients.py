"""Gradients of each example of a batch, in one backward pass for all examples.

Two ways give the same result up to rounding:

* ``layers``: one ordinary backward pass. Where ``y = W x`` in every token, an example's gradient of W is the sum over
  its tokens of ``dloss/dy x^T`` (I. Goodfellow, "Efficient Per-Example Gradient Computations", 2015,
  https://arxiv.org/abs/1510.01799, for layers that see a sequence). It works with every base and attention kernel; the
  trained weights have to be those of linear layers, as LoRA's are.
* ``func``: `torch.func`, ``vmap`` over the examples of ``grad`` of ``functional_call``. It works with every trained weight,
  but not with a quantized base: bitsandbytes' products have no rule for ``vmap``. Attention runs as plain matrix
  products, since the fused kernels have no such rule either; that keeps heads x tokens^2 numbers per layer and example.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedlight.modules.functional import IGNORED, sft_loss, token_log_probs
from fedlight.modules.language.adapters import trained_parameters
from fedlight.modules.language.readout import head_logits, hidden_states
from fedlight.modules.sft import SFTModule
from fedlight.support.checks import Settings, check_choice, refuse_below
from fedlight.support.words import first_line

Gradients = dict[str, Tensor]
"""Name of a trained weight -> ``(batch, *shape of the weight)``, fp32."""

WAYS = ("layers", "func")


@dataclass(frozen=True)
class ExampleGradients(Settings):
    """How the gradients of single rows are computed.

    Args:
        way: ``layers``: by the inputs and output gradients of each layer; ``func``: by ``torch.func``.
        batch_size: rows whose gradients are in memory at once, 4 bytes per weight of the adapter and row.

    Raises:
        ValueError: a setting is misspelt or below 1.
    """

    way: str = "layers"
    batch_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("gradients.way", self.way, WAYS)
        refuse_below(1, batch_size=self.batch_size)


def check_way(way: str, base: str) -> None:
    """Raise ValueError for a way that does not work with the base.

    Examples:
        >>> check_way("func", "nf4")
        Traceback (most recent call last):
        ...
        ValueError: gradients.way='func' does not go through base='nf4': set it to 'layers', or base to 'plain'
    """
    if way == "func" and base != "plain":
        raise ValueError(
            f"gradients.way='func' does not go through base={base!r}: set it to 'layers', or base to 'plain'"
        )


def example_gradients(module: SFTModule, batch: dict[str, Tensor], way: str = "layers") -> Gradients:
    """Return the gradients of each example's loss by the trained weights, equal to those of a loop over ``example_losses``.

    The module, configured with one adapter, is unchanged, the gradients of its weights included. Set eval mode to have no
    dropout. The texts of the batch, ``(batch, tokens)``, are padded on the right.

    Raises:
        ValueError: the way does not work with the trained weights.
    """
    return _by_func(module, batch) if way == "func" else _by_layers(module, batch)


def _by_func(module: SFTModule, batch: dict[str, Tensor]) -> Gradients:
    targets = batch["labels"][:, 1:]  # [batch, tokens - 1]
    scored = targets != IGNORED
    # A vmapped function cannot pick labelled positions by a mask, because their number differs; all examples get the most.
    most = max(1, int(scored.sum(dim=1).max()))
    places = torch.argsort(~scored, dim=1, stable=True)[:, :most]  # [batch, most], scored ones first
    # Names within `_ExampleLoss`, which holds the module.
    weights = {f"module.{name}": weight.detach() for name, weight in trained_parameters(module).items()}
    example_loss = _ExampleLoss(module)

    def loss(weights: dict[str, Tensor], *example: Tensor) -> Tensor:
        return functional_call(example_loss, weights, example)

    batched = vmap(grad(loss), in_dims=(None, 0, 0, 0), randomness="different")
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no rule for vmap
        try:
            gradients = batched(weights, batch["input_ids"], places, targets.gather(1, places))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # as in layers of experts, which count their tokens
            raise ValueError(
                f"gradients.way='func' does not go through this model ({first_line(error)}): set it to 'layers', and "
                "lora.targets to layers that see whole sequences"
            ) from error
    return {name.removeprefix("module."): gradient for name, gradient in gradients.items()}


class _ExampleLoss(nn.Module):
    """Loss of one text, by operations whose shapes do not depend on its content."""

    def __init__(self, module: SFTModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of ids ``(tokens,)`` with ``targets`` as the tokens after ``places``, each ``(places,)``."""
        # Nothing is masked: a causal model does not see the padding after a token.
        mask = torch.ones(1, len(ids), dtype=torch.long, device=ids.device)
        hidden = hidden_states(self.module.causal_lm, ids[None], mask)[0, places]
        log_probs = token_log_probs(head_logits(self.module.causal_lm, hidden), targets)
        return sft_loss(log_probs[None], targets[None] != IGNORED)[0]


def _by_layers(module: SFTModule, batch: dict[str, Tensor]) -> Gradients:
    weights, size = trained_parameters(module), len(batch["input_ids"])
    layers = {name: _find_layer(module, name) for name in weights}
    gradients: Gradients = {}
    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_hook(_make_hook(name, size, gradients)).remove)
        losses = module.example_losses(batch)
        # Of the returned sums over the batch, whether there is one; the call runs the hooks and leaves .grad alone.
        sums = torch.autograd.grad(losses.sum(), list(weights.values()), allow_unused=True)
    for name, total in zip(weights, sums, strict=True):
        if total is not None and name not in gradients:
            raise ValueError(
                f"gradients.way='layers' sees no input of {name}, whose weight other code reads: take it out of lora.targets"
            )
    return {
        # A weight that the loss does not reach has gradient 0.
        name: gradients[name] if name in gradients else weight.new_zeros(size, *weight.shape)
        for name, weight in weights.items()
    }


def _find_layer(module: nn.Module, name: str) -> nn.Linear:
    layer_name, _, role = name.rpartition(".")
    layer = module.get_submodule(layer_name)
    if not isinstance(layer, nn.Linear) or role != "weight":
        raise ValueError(
            f"gradients.way='layers' takes weights of linear layers alone, and {name} is trained: set it to 'func'"
        )
    return layer


def _make_hook(
    name: str, size: int, gradients: Gradients
) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    """Return a forward hook whose backward pass adds a layer's gradients by example to ``gradients``."""

    def keep(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        seen = inputs[0].detach()  # [batch, tokens, in]
        if seen.ndim != 3 or len(seen) != size:
            raise ValueError(
                f"gradients.way='layers' needs inputs (batch, tokens, width), and {name} has {tuple(seen.shape)}: set "
                "it to 'func', or lora.targets to layers that see whole sequences"
            )

        def add(slope: Tensor) -> None:
            gradient = torch.einsum("bto,bti->boi", slope.float(), seen.float())  # sum of dloss/dy x^T
            # A layer may compute more than once in a forward pass.
            gradients[name] = gradients[name] + gradient if name in gradients else gradient

        if output.requires_grad:  # HRM computes its first passes without gradients
            output.register_hook(add)

    return keep
