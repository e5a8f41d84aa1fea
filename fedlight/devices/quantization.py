"""Base of a client in 8 or 4 bits while the server's stays as it is: one copy per precision, for any number of clients.

int8 is T. Dettmers et al., "LLM.int8()", NeurIPS 2022, https://arxiv.org/abs/2208.07339; NF4 is T. Dettmers et al.,
"QLoRA", NeurIPS 2023, https://arxiv.org/abs/2305.14314, in blocks of 64 weights without double quantization. Both are the
layers of bitsandbytes, with the settings of ``transformers``.

While a precision is in use, the server's layers stay in place and only their ``forward`` is that of their quantized twins.
So names, parameters, hooks and optimizers never change, and going back restores the server's computation exactly.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from fedlight.devices.hardware import FreedMemory

HEADS = ("classifier", "score", "pre_classifier", "pooler.dense")
"""Modules that a quantized base keeps unquantized, since they may be new and trained."""

FORMS = {16: "plain", 8: "int8", 4: "nf4"}
"""Names of bases, by their bits."""


@runtime_checkable
class WritesTokens(Protocol):
    """Language model with an output head, which bitsandbytes does not quantize."""

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the layer that gives the logits of the vocabulary, or None."""


def quantizable_layers(module: nn.Module) -> dict[str, Any]:
    """Return the frozen linear layers that bitsandbytes would quantize, by name; also GPT-2's, of the class ``Conv1D``.

    Left out are the output head, layers of :data:`HEADS`, layers that share a weight with another, layers of an adapter, and
    subclasses of ``nn.Linear``.
    """
    parts = list(module.modules())
    heads = {id(part.get_output_embeddings()) for part in parts if isinstance(part, WritesTokens)}
    users = Counter(id(weight) for part in parts for weight in part.parameters(recurse=False))
    return {
        name: part
        for name, part in module.named_modules()
        # Other code reads the weight of a subclass directly.
        if (type(part) is nn.Linear or is_transposed(part))
        and not part.weight.requires_grad
        and id(part) not in heads
        and users[id(part.weight)] == 1  # not of tied embeddings
        and "lora_" not in name
        and "original_module" not in name.split(".")  # the one that PEFT trains a copy of
        and not any(f".{head}." in f".{name}." for head in HEADS)
    }


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is GPT-2's, whose weight is ``(in, out)``."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"


class QuantizedBase:
    """Switch between the base as it was loaded and quantized twins of its layers.

    The twins are made when a precision is first used, and kept. They are the same, bit for bit, as in a base that is loaded
    as int8 or NF4. They take memory of this machine, 1 or 1/2 byte a weight: a fleet of one precision saves it by loading
    the base in that form, so that there is nothing to switch.

    Args:
        module: module with frozen linear layers, usually a base model under an adapter.

    Attributes:
        own_bits: bits of the base when it was loaded: 16 for any unquantized one, else 8 or 4.
        bits: bits in use now.

    Examples:
        >>> module = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 1))
        >>> x, base = torch.ones(1, 64), QuantizedBase(module)
        >>> before = module(x)
        >>> base.use(4)
        >>> torch.equal(module(x), before)
        False
        >>> base.use(base.own_bits)
        >>> torch.equal(module(x), before)
        True
    """

    def __init__(self, module: nn.Module) -> None:
        self.own_bits = loaded_bits(module)
        self.bits = self.own_bits
        self._layers = quantizable_layers(module) if self.own_bits == 16 else {}
        self._freed = FreedMemory()
        self._twins: dict[tuple[str, int], tuple[tuple[object, ...], Callable[[Tensor], Tensor]]] = {}

    def check(self, bits: int) -> None:
        """Check that the module can compute with a base of ``bits``.

        Raises:
            ValueError: ``bits`` is not 16, 8 or 4, the base is loaded in another quantized form, there is no frozen
                linear layer, or one is trained by now or in a type that cannot be quantized.
        """
        if bits not in FORMS:
            raise ValueError(f"weight_bits={bits} must be 16, 8 or 4")
        if bits == self.own_bits:
            return
        if self.own_bits != 16:
            raise ValueError(
                f"weight_bits={bits} does not go with base={FORMS[self.own_bits]!r}, whose weights are rounded to "
                f"{self.own_bits} bits: load base='plain', or give all devices weight_bits: {self.own_bits}"
            )
        if not self._layers:
            raise ValueError(
                f"weight_bits={bits} needs frozen nn.Linear layers to quantize, and the module has none: freeze its "
                "base, or give the devices weight_bits: 16"
            )
        for name, layer in self._layers.items():
            if layer.weight.requires_grad:
                raise ValueError(
                    f"weight_bits={bits}: {name} is trained by now: keep it frozen, or set weight_bits: 16"
                )
            if bits == 4 and layer.weight.dtype == torch.float64:
                raise ValueError(
                    f"weight_bits=4: {name} is in 64 bits, which NF4 does not take: set trainer.precision to 32-true, or "
                    "weight_bits: 8"
                )

    def use(self, bits: int) -> None:
        """Let the module compute with a base of ``bits`` from now on: 16 for the server's own, 8 for int8, 4 for NF4.

        Raises:
            ValueError: see `check`.
        """
        self.check(bits)
        for name, layer in self._layers.items():
            if bits == self.own_bits:
                vars(layer).pop("forward", None)
            else:
                vars(layer)["forward"] = self._twin(name, layer, bits)
        self.bits = bits

    def _twin(self, name: str, layer: Any, bits: int) -> Callable[[Tensor], Tensor]:
        weight = layer.weight
        source = (weight.data_ptr(), weight._version, weight.device, weight.dtype)
        made_from, forward = self._twins.get((name, bits), (None, None))
        if made_from != source or forward is None:  # none yet, or the weights were reloaded or moved
            forward = _following(layer, (_int8 if bits == 8 else _nf4)(_as_linear(layer)))
            self._twins[name, bits] = source, forward
            self._freed.add(weight.numel())
        return forward


def loaded_bits(module: nn.Module) -> int:
    """Return the bits by the type of the weights."""
    # To import bitsandbytes and ask for its layers takes seconds.
    forms = {part.weight.dtype for part in module.modules() if isinstance(part, nn.Linear)}
    return 4 if torch.uint8 in forms else 8 if torch.int8 in forms else 16


def _as_linear(layer: Any) -> nn.Linear:
    if not is_transposed(layer):
        return cast(nn.Linear, layer)
    with torch.device("meta"):
        linear = nn.Linear(*layer.weight.shape)
    linear.weight = nn.Parameter(layer.weight.detach().T.contiguous(), requires_grad=False)
    linear.bias = layer.bias
    return linear


def _int8(layer: nn.Linear) -> nn.Module:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    quiet_int8()
    with torch.device("meta"):  # its weight is replaced
        twin = Linear8bitLt(
            layer.in_features, layer.out_features, False, has_fp16_weights=False, threshold=6.0
        )
    twin.weight = Int8Params(layer.weight.detach().cpu(), requires_grad=False).to(layer.weight.device)
    return _with_bias(twin, layer)


def _nf4(layer: nn.Linear) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    weight = layer.weight.detach()
    with torch.device("meta"):
        twin = Linear4bit(layer.in_features, layer.out_features, False, compute_dtype=weight.dtype)
    twin.weight = Params4bit(
        weight, requires_grad=False, compress_statistics=False, quant_type="nf4", module=twin
    ).to(weight.device)  # bitsandbytes quantizes on the way
    # In evaluation it would repack the weights for a CPU kernel that passes no gradients on to the layers below.
    twin.support_avx512bf16_for_cpu = False
    return _with_bias(twin, layer)


def _with_bias(twin: nn.Module, layer: nn.Linear) -> nn.Module:
    if layer.bias is not None:  # a new parameter on the same values: bitsandbytes casts it in place
        twin.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    return twin


def _following(layer: nn.Module, twin: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the twin's ``forward`` in the layer's mode."""

    @torch.compiler.disable  # in a module that is compiled, bitsandbytes makes the compiler fail
    def forward(inputs: Tensor) -> Tensor:
        twin.training = layer.training  # bitsandbytes chooses its kernels by the mode
        return cast(Tensor, twin.forward(inputs))

    vars(forward)["twin"] = twin  # training of several clients in one batch reads its kind
    return forward


def quiet_int8() -> None:
    """Silence the notice of bitsandbytes at every int8 product that it casts its inputs to fp16."""
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_no_cast)


def _is_no_cast(record: logging.LogRecord) -> bool:
    return "MatMul8bitLt: inputs will be cast" not in record.getMessage()
