"""The gradient of every example of a batch by itself, in one backward pass for all of them.

Two ways, with the same result up to rounding:

* ``layers``: one ordinary backward pass. Where ``y = W x`` in every token, an example's gradient of W is the sum over
  its tokens of ``dloss/dy x^T`` (I. Goodfellow, "Efficient Per-Example Gradient Computations", 2015,
  https://arxiv.org/abs/1510.01799, for layers that see a sequence). It takes any base and any attention kernel; what is
  trained has to be the weights of linear layers, as LoRA's are.
* ``func``: `torch.func`, ``vmap`` over the examples of ``grad`` of ``functional_call``. It takes whatever weight is
  trained, but not a quantized base: bitsandbytes' products have no rule for ``vmap``. Attention runs as plain matrix
  products, since the fused kernels have no such rule either; that keeps heads x tokens^2 numbers a layer and example.

``benchmarks/example_gradients.py`` compares both with a loop over the examples.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedlight.modules.functional import IGNORED, sft_loss, token_log_probs
from fedlight.modules.language.adapters import trained_parameters
from fedlight.modules.language.readout import head_logits, hidden_states
from fedlight.modules.sft import SFTModule
from fedlight.support.checks import check_choice

Gradients = dict[str, Tensor]
"""Name of a trained weight -> ``(batch, *shape of the weight)``, fp32."""

WAYS = ("layers", "func")


def check_way(way: str, base: str) -> None:
    """Refuses a way that is misspelt or does not go with the form of the base.

    Raises:
        ValueError: it is, or does not.

    Example:
        >>> check_way("func", "nf4")
        Traceback (most recent call last):
        ...
        ValueError: gradients='func' does not go through base='nf4': set gradients to 'layers', or base to 'plain'
    """
    check_choice("gradients", way, WAYS)
    if way == "func" and base != "plain":
        raise ValueError(
            f"gradients='func' does not go through base={base!r}: set gradients to 'layers', or base to 'plain'"
        )


def example_gradients(module: SFTModule, batch: dict[str, Tensor], way: str = "layers") -> Gradients:
    """Gradients of each example's loss by the trained weights, as ``example_losses`` and a loop would give them.

    The module stays as it was, the gradients of its weights included. Whoever wants no dropout sets eval mode.

    Args:
        module: configured, with one adapter.
        batch: ``input_ids``, ``attention_mask``, ``labels``, each ``(batch, tokens)``, padded on the right.
        way: ``layers`` or ``func``, see above.

    Raises:
        ValueError: the way is unknown, or does not go with the base or with what is trained.
    """
    check_way(way, module.options.base)
    return _by_func(module, batch) if way == "func" else _by_layers(module, batch)


def _by_func(module: SFTModule, batch: dict[str, Tensor]) -> Gradients:
    targets = batch["labels"][:, 1:]
    scored = targets != IGNORED
    # A vmapped function cannot pick out labelled positions by a mask, as their number differs: as many places for each.
    most = max(1, int(scored.sum(dim=1).max()))
    places = torch.argsort(~scored, dim=1, stable=True)[:, :most]
    weights = {f"module.{name}": weight.detach() for name, weight in trained_parameters(module).items()}
    one = _OneExample(module)

    def loss(weights: dict[str, Tensor], *example: Tensor) -> Tensor:
        return functional_call(one, weights, example)

    batched = vmap(grad(loss), in_dims=(None, 0, 0, 0), randomness="different")
    with sdpa_kernel(SDPBackend.MATH):
        found = batched(weights, batch["input_ids"], places, targets.gather(1, places))
    return {name.removeprefix("module."): gradient for name, gradient in found.items()}


class _OneExample(nn.Module):
    """The loss of one text, by operations whose shapes do not depend on what is in it."""

    def __init__(self, module: SFTModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        """The loss of ids ``(tokens,)`` whose tokens after ``places`` shall be ``targets``, each ``(places,)``."""
        # Nothing is masked: a causal model does not see the padding behind a token.
        seen = torch.ones(1, len(ids), dtype=torch.long, device=ids.device)
        hidden = hidden_states(self.module.causal_lm, ids[None], seen)[0, places]
        log_probs = token_log_probs(head_logits(self.module.causal_lm, hidden), targets)
        return sft_loss(log_probs[None], targets[None] != IGNORED)[0]


def _by_layers(module: SFTModule, batch: dict[str, Tensor]) -> Gradients:
    weights, size = trained_parameters(module), len(batch["input_ids"])
    found: Gradients = {}
    with _watched(_linear_layers(module, weights), size, found):
        losses = module.example_losses(batch)
        # Its results, the sums over the batch, are of no use; on the way it calls the hooks, and leaves .grad alone.
        torch.autograd.grad(losses.sum(), list(weights.values()), allow_unused=True)
    return {
        name: found[name] if name in found else weight.new_zeros(size, *weight.shape)
        for name, weight in weights.items()
    }


def _linear_layers(module: nn.Module, weights: dict[str, nn.Parameter]) -> dict[str, nn.Linear]:
    """Name of each trained weight -> its layer."""
    layers = {}
    for name in weights:
        layer_name, _, role = name.rpartition(".")
        layer = module.get_submodule(layer_name)
        if not isinstance(layer, nn.Linear) or role != "weight":
            raise ValueError(
                f"gradients='layers' takes weights of linear layers alone, and {name} is trained: set gradients to 'func'"
            )
        layers[name] = layer
    return layers


@contextmanager
def _watched(layers: dict[str, nn.Linear], size: int, found: Gradients) -> Iterator[None]:
    """Inside, a backward pass adds each layer's gradients by example to ``found``."""
    handles = [layer.register_forward_hook(_keeper(name, size, found)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keeper(name: str, size: int, found: Gradients) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    def keep(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        seen = inputs[0].detach()
        if seen.ndim != 3 or len(seen) != size:
            raise ValueError(
                f"gradients='layers' needs inputs (batch, tokens, width), and {name} has {tuple(seen.shape)}: set "
                "gradients to 'func', or lora_targets to layers that see whole sequences"
            )

        def add(slope: Tensor) -> None:
            gradient = torch.einsum("bto,bti->boi", slope.float(), seen.float())
            found[name] = found[name] + gradient if name in found else gradient

        output.register_hook(add)

    return keep
