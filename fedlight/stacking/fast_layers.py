"""Layers of a loaded network that take less time than those of ``transformers`` and PEFT.

Adapters: PEFT writes ``W x``, ``B A x``, its multiple and the sum one after another, each with a pass over memory. One
product with an addend (BLAS's gemm) saves half of them: a training step of a tiny language model takes a tenth less time on
a CPU. With a scaling that is a power of two the numbers are PEFT's; else they differ by rounding. Under a base in bf16,
PEFT casts the input of each adapter to fp32, computes its products there and casts the sum back. Here the adapter is
rounded to bf16 instead, as by autocast, and its gradients are cast to fp32: a step of SmolLM2 (135 M parameters, eight
texts of 52 or 184 tokens) takes a fifth less time, and its gradients are about as far from those in fp32. Where texts are
written token by token, its products stay in fp32: with few rows those in bf16 take three times as long.

Attention over short texts in bf16 on a CPU is computed in fp32: the backward pass of torch's kernel takes much longer in
bf16 than in fp32 there, four times as long at 50 tokens, twice at 200, as long at 400. Other lengths, number types and
devices are left to ``transformers``.
"""

from typing import Any

import torch
from peft.tuners.lora import layer as peft_lora
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fedlight.stacking.dropout import DropoutMasks, SeededDropout, seed_dropout

LONGEST = 256  # tokens
FEW_ROWS = 64
"""Most rows whose adapter products take less time in fp32 than in bf16: those of a text that is being written."""
_MARK = "attends_in_fp32"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def use_fast_layers(network: nn.Module, masks: DropoutMasks) -> None:
    """Change attention and adapters of a base with adapters, and give the adapters dropout of those masks."""
    attend_in_fp32(network)
    seed_dropout(network, masks)
    fuse_lora(network)


def attend_in_fp32(network: nn.Module) -> None:
    """Let a network compute attention over short texts in bf16 on a CPU in fp32; others in the process stay as they are."""
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if not hasattr(before, _MARK):

        def attend(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None = None,
            **options: Any,
        ) -> Any:
            if not getattr(module, _MARK, False) or not _is_short(query, key, options):
                return before(module, query, key, value, attention_mask, **options)
            if attention_mask is not None and attention_mask.dtype != torch.bool:
                attention_mask = attention_mask.float()  # added to the scores
            in_fp32 = (each.float() for each in (query, key, value))
            attended, weights = before(module, *in_fp32, attention_mask, **options)
            return attended.to(query.dtype), weights

        setattr(attend, _MARK, True)
        # A name of its own would lead some architectures into branches that are meant for other kernels than "sdpa".
        AttentionInterface.register("sdpa", attend)
    for layer in network.modules():
        setattr(layer, _MARK, True)


def _is_short(query: Tensor, key: Tensor, options: dict[str, Any]) -> bool:
    here = query.dtype == torch.bfloat16 and query.device.type in ("cpu", "meta")  # meta: shapes alone
    # One query, with a cache, has no backward pass; a bias of positions would have to be cast as well.
    return here and query.shape[2] > 1 and key.shape[2] <= LONGEST and options.get("position_bias") is None


class FusedLora(peft_lora.Linear):
    """PEFT's ``lora.Linear`` with a faster forward pass of one plain adapter in the type of its input."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return ``W x + scaling * B A dropout(x)``, ``(..., out)``."""
        if self.disable_adapters and not self.merged:
            return self.base_layer(x, *args, **kwargs)
        adapter = self._plain_adapter()
        if adapter is None or args or kwargs or _has_autocast(x.device.type):
            return super().forward(x, *args, **kwargs)
        a, b, scaling = self.lora_A[adapter].weight, self.lora_B[adapter].weight, self.scaling[adapter]
        if x.dtype not in (b.dtype, torch.bfloat16):
            return super().forward(x)
        result: Tensor = self.base_layer(x)
        drop = self.lora_dropout[adapter]
        dropped = drop(x, x.dtype) if isinstance(drop, SeededDropout) else drop(x)
        width, few = result.shape[-1], x.numel() <= FEW_ROWS * x.shape[-1]
        dtype = b.dtype if few and not torch.is_grad_enabled() else x.dtype
        small = functional.linear(dropped.to(dtype), a.to(dtype))
        sums = torch.addmm(  # one pass over memory
            result.reshape(-1, width).to(dtype),
            small.reshape(-1, small.shape[-1]),
            b.t().to(dtype),
            alpha=scaling,
        )
        return sums.to(x.dtype).view(result.shape)

    def _plain_adapter(self) -> str | None:
        """Return the one active adapter; None without one, or where A or B is more than a product with a matrix."""
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        [adapter] = self.active_adapters
        if adapter not in self.lora_A or adapter in self.lora_variant:
            return None
        for factor in (self.lora_A[adapter], self.lora_B[adapter]):
            # A hook has to be called, for example that of gradients by example.
            hooked = "forward" in vars(factor) or any(vars(factor)[name] for name in _HOOKS)
            if type(factor) is not nn.Linear or factor.bias is not None or hooked:
                return None
        return adapter


def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)  # torch refuses meta


def fuse_lora(network: nn.Module) -> None:
    """Make PEFT's LoRA layers on plain linear layers `FusedLora`; quantized ones and others stay as they are."""
    for layer in network.modules():
        if type(layer) is peft_lora.Linear and type(layer.base_layer) is nn.Linear:
            layer.__class__ = FusedLora  # keeps its weights and hooks
