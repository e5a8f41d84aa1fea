"""Forward passes of linear layers with a weight of each client: the LoRA pair of an adapter, or a whole layer.

They compute the results of PEFT's ``lora.Linear`` and ``lora.Linear4bit``, and of torch's ``nn.Linear``, which take one
client at a time, with the same casts. The adapter's product is one batched product over clients. Modules that cannot train
several clients in one batch are refused before work starts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fedlight.stacking.rows import Rows

REMEDY = "set clients_at_once to 1"
# Names of classes, so that neither peft nor bitsandbytes is imported.
_LORA_LAYERS = {
    "peft.tuners.lora.layer.Linear",
    "peft.tuners.lora.bnb.Linear4bit",
    "fedlight.stacking.fast_layers.FusedLora",
}
_BASES = {
    "torch.nn.modules.linear.Linear",
    "transformers.pytorch_utils.Conv1D",
    "bitsandbytes.nn.modules.Linear4bit",
}


class StackedLora:
    """Forward pass of a PEFT LoRA layer whose A, ``(clients, r, in)``, and B, ``(clients, out, r)``, are stacked.

    ``bias``, that of B, is ``(clients, out)``; ``scalings`` are alpha / r of each client; ``drop`` is the adapter's dropout,
    a function of the input and of the result's ``dtype``.
    """

    def __init__(
        self,
        layer: Any,
        name: str,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        scalings: list[float],
        drop: Callable[..., Tensor] | None,
    ) -> None:
        self.layer, self.name, self.base = layer, name, layer.base_layer
        self.a, self.b, self.bias, self.drop = a, b, bias, drop
        # PEFT casts the product on a 4-bit layer to the type of the result, and the sum on other layers.
        self.casts_product = type(layer).__name__ == "Linear4bit"
        # It rounds an adapter in fp32 under a base in bf16.
        self.rounds = type(layer).__name__ == "FusedLora" and bias is None
        self.scaling: Any = scalings[0]
        if len(set(scalings)) > 1:
            self.scaling = torch.tensor(scalings, dtype=a.dtype, device=a.device)[:, None, None]
        self.rows: Rows | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's result, ``(m * rows, ..., out)``, with each client's adapter on its own rows."""
        result: Tensor = self.base(x, *args, **kwargs)
        if self.layer._disable_adapters:
            return result
        assert self.rows is not None, "set_rows comes first"
        rows, shape, kind = self.rows, result.shape, x.device.type
        tiles = rows.tiles(rows.texts.whole(x), self.name)
        casts = torch.is_autocast_enabled(kind)
        rounds = self.rounds and x.dtype == torch.bfloat16 and not casts
        dtype = x.dtype if rounds else self.a.dtype
        if self.drop is not None and self.layer.training:
            x = self.drop(x, dtype=dtype)  # the object that other layers have got as well
        x = rows.texts.whole(x)
        result = result.view(*x.shape[:-1], shape[-1])
        x = rows.split(x.to(torch.get_autocast_dtype(kind) if casts else dtype), tiles)
        if rows.equal and self.bias is None and result.dtype == x.dtype:
            blocks = result.reshape(len(x), -1, result.shape[-1])
            added: Tensor = LoraProduct.apply(x, self.a, self.b, self.scaling, blocks)
            return added.view(shape)
        product: Tensor = LoraProduct.apply(x, self.a, self.b, self.scaling, None)
        if self.bias is not None:
            product = product + (self.bias[:, None] * self.scaling).repeat(tiles, 1, 1).to(product.dtype)
        product = rows.join(product, result.shape, tiles)
        if self.casts_product:
            return (result + product.to(result.dtype)).view(shape)
        return (result + product).to(result.dtype).view(shape)


class LoraProduct(torch.autograd.Function):
    """``sums + scaling * x A^T B^T`` of each client, with the products of the backward pass in their fastest layout.

    Autograd's own products take twice the time: those with r columns are slow where a column's entries lie far apart.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, scaling: Any, sums: Tensor | None) -> Tensor:
        """Return the product of inputs, ``(m * clients, positions, in)``, with A and B, added to ``sums`` if given.

        It and the sums are ``(m * clients, positions, out)``; ``scaling`` is a number, or ``(clients, 1, 1)``.
        """
        tiles = len(x) // len(a)
        # Transposed once, as B is small.
        first, second = a.to(x.dtype), (b * scaling).to(x.dtype).mT.contiguous()
        if tiles > 1:
            first, second = first.repeat(tiles, 1, 1), second.repeat(tiles, 1, 1)
        small = torch.bmm(x, first.mT)  # [m * clients, positions, r]
        ctx.save_for_backward(x, first, second, small)
        ctx.scaling, ctx.tiles, ctx.kinds = scaling, tiles, (a.dtype, b.dtype)
        return torch.bmm(small, second) if sums is None else torch.baddbmm(sums, small, second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of `forward`."""
        x, first, second, small = ctx.saved_tensors
        needs_x, needs_a, needs_b, _, needs_sums = ctx.needs_input_grad
        of_x = of_a = of_b = None
        if needs_x or needs_a:
            of_small = torch.bmm(gradient, second.mT)
            of_x = torch.bmm(of_small, first) if needs_x else None
            # Products with r rows, and not with r columns.
            of_a = _add_tiles(torch.bmm(of_small.mT, x), ctx.tiles).to(ctx.kinds[0]) if needs_a else None
        if needs_b:
            of_b = _add_tiles(torch.bmm(small.mT, gradient), ctx.tiles).mT.to(ctx.kinds[1]) * ctx.scaling
        return of_x, of_a, of_b, None, gradient if needs_sums else None


def _add_tiles(tiled: Tensor, tiles: int) -> Tensor:
    return tiled if tiles == 1 else tiled.view(tiles, -1, *tiled.shape[1:]).sum(dim=0)


class StackedLinear:
    """Forward pass of a linear layer that is trained as a whole, with weight ``(clients, out, in)``.

    Weight and bias, ``(clients, out)``, may also be shared by the clients.
    """

    def __init__(self, layer: nn.Linear, name: str, weight: Tensor, bias: Tensor | None) -> None:
        self.layer, self.name, self.weight, self.bias = layer, name, weight, bias
        self.rows: Rows | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's result, ``(m * rows, ..., out)``, with each client's weight on its own rows."""
        assert self.rows is not None, "set_rows comes first"
        before, x = x, self.rows.texts.whole(x)
        tiles = self.rows.tiles(x, self.name)
        blocks = self.rows.split(x, tiles)
        if self.weight.dim() == 3:
            outputs = torch.bmm(blocks, self.weight.repeat(tiles, 1, 1).mT)
        else:
            outputs = functional.linear(blocks, self.weight)
        if self.bias is not None:
            bias = self.bias.expand(self.rows.clients, -1)
            outputs = outputs + bias.repeat(tiles, 1)[:, None].to(outputs.dtype)
        whole = self.rows.join(outputs, torch.Size((*x.shape[:-1], outputs.shape[-1])), tiles)
        return whole.view(*before.shape[:-1], -1)


def kind_of(layer: object) -> str:
    """Return module and name of an object's class.

    Examples:
        >>> kind_of(nn.Linear(1, 1))
        'torch.nn.modules.linear.Linear'
    """
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def check_lora(name: str, layer: Any, adapter: str) -> None:
    """Raise ValueError for a PEFT layer whose adapter cannot be stacked."""
    base = layer.base_layer
    if kind_of(layer) not in _LORA_LAYERS or kind_of(base) not in _BASES:
        raise ValueError(
            f"{name} is a LoRA adapter on a layer of type {type(base).__name__}: clients side by side can train adapters on "
            f"nn.Linear and NF4 layers alone; {REMEDY}"
        )
    if adapter in layer.lora_variant:
        variant = type(layer.lora_variant[adapter]).__name__.removesuffix("LinearVariant")
        raise ValueError(
            f"{name} has an adapter of the kind {variant}: clients side by side can train plain LoRA alone; {REMEDY}"
        )
    if layer.merged:
        raise ValueError(f"{name} has its adapter merged into its weights: call unmerge_adapter first")
    refuse_replaced(name, layer)


def refuse_replaced(name: str, layer: nn.Module) -> None:
    """Raise ValueError for a layer whose ``forward`` was replaced on the object, which stacking would undo."""
    if "forward" in vars(layer):
        raise ValueError(
            f"forward of {name} was replaced by other code, and stacking replaces it too; {REMEDY}"
        )


def refuse_mixing(module: nn.Module) -> None:
    """Raise ValueError for a module with layers whose result for one example depends on the rest of the batch."""
    for name, layer in module.named_modules():
        # The base of a device computes by a twin, which is in the layer's ``forward`` (fedlight.devices.quantization).
        computes = getattr(vars(layer).get("forward"), "twin", layer)
        if any(kind.__name__ == "Linear8bitLt" for kind in type(computes).__mro__):
            raise ValueError(
                f"{name} is an int8 layer (LLM.int8), which picks its outlier columns over all clients of a batch: use "
                f"model.base=nf4 or plain, or {REMEDY}"
            )
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"{name} is batch normalization, whose statistics would be those of several clients; {REMEDY}"
            )
        dropout = isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
        if dropout and type(layer) is not nn.Dropout:
            raise ValueError(
                f"{name} is a {type(layer).__name__}, which draws for several clients at once: use nn.Dropout, or {REMEDY}"
            )
