"""Forward passes of linear layers with a weight of each client: the LoRA pair of an adapter, or a whole layer.

They compute what PEFT's ``lora.Linear`` and ``lora.Linear4bit``, and torch's ``nn.Linear``, compute for one client at a
time, with the same casts. The adapter's product is one batched product over clients.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlight.stacking.rows import Rows


class StackedLora:
    """Forward pass of a PEFT LoRA layer whose A, ``(clients, r, in)``, and B, ``(clients, out, r)``, are stacked.

    Args:
        layer: PEFT's layer.
        name: its name, for errors.
        a: A.
        b: B.
        bias: bias of B, ``(clients, out)``, or None.
        scalings: of each client, alpha / r.
        drop: dropout of the adapter's input, a function of it, or None.
    """

    def __init__(
        self,
        layer: Any,
        name: str,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        scalings: list[float],
        drop: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.layer, self.name, self.base = layer, name, layer.base_layer
        self.a, self.b, self.bias, self.drop = a, b, bias, drop
        # PEFT casts the product on a 4-bit layer to the type of the result, and the sum on other layers.
        self.casts_product = type(layer).__name__ == "Linear4bit"
        alike = len(set(scalings)) == 1
        self.scaling = scalings[0] if alike else 1.0
        self.scalings = (
            None if alike else torch.tensor(scalings, dtype=a.dtype, device=a.device)[:, None, None]
        )
        self.rows: Rows | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's result, ``(m * rows, ..., out)``, with each client's adapter on its own rows."""
        result: Tensor = self.base(x, *args, **kwargs)
        if self.layer._disable_adapters:
            return result
        assert self.rows is not None, "set_rows comes first"
        rows, a, b = self.rows, self.a, self.b
        tiles = rows.tiles(x, self.name)
        if x.dtype != a.dtype:
            x = x.to(a.dtype)
        if self.drop is not None and self.layer.training:
            x = self.drop(x)
        if tiles > 1:
            a, b = a.repeat(tiles, 1, 1), b.repeat(tiles, 1, 1)
        small = torch.bmm(rows.split(x, tiles), a.mT)
        if self.scalings is not None:
            small = small * self.scalings.repeat(tiles, 1, 1)
        if rows.equal and self.bias is None and result.dtype == small.dtype:
            blocks = result.reshape(tiles * rows.clients, -1, result.shape[-1])
            return torch.baddbmm(blocks, small, b.mT, alpha=self.scaling).view(result.shape)
        if self.bias is None:
            product = torch.bmm(small, b.mT)
        else:
            bias = self.bias if self.scalings is None else self.bias * self.scalings[:, 0]
            product = torch.baddbmm(bias.repeat(tiles, 1)[:, None], small, b.mT)
        product = rows.join(product, result.shape, tiles) * self.scaling
        if self.casts_product:
            return result + product.to(result.dtype)
        return (result + product).to(result.dtype)


class StackedLinear:
    """Forward pass of a linear layer that is trained as a whole, with weight ``(clients, out, in)``.

    Args:
        layer: torch's layer.
        name: its name, for errors.
        weight: its weight, stacked or shared by the clients.
        bias: its bias, ``(clients, out)``, shared, ``(out,)``, or None.
    """

    def __init__(self, layer: nn.Linear, name: str, weight: Tensor, bias: Tensor | None) -> None:
        self.layer, self.name, self.weight, self.bias = layer, name, weight, bias
        self.rows: Rows | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's result, ``(m * rows, ..., out)``, with each client's weight on its own rows."""
        assert self.rows is not None, "set_rows comes first"
        tiles = self.rows.tiles(x, self.name)
        blocks = self.rows.split(x, tiles)
        if self.weight.dim() == 3:
            found = torch.bmm(blocks, self.weight.repeat(tiles, 1, 1).mT)
        else:
            found = functional.linear(blocks, self.weight)
        if self.bias is not None:
            bias = self.bias if self.bias.dim() == 2 else self.bias.expand(self.rows.clients, -1)
            found = found + bias.repeat(tiles, 1)[:, None].to(found.dtype)
        return self.rows.join(found, torch.Size((*x.shape[:-1], found.shape[-1])), tiles)
