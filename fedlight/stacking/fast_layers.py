"""Layers of a loaded network that take less time than those of ``transformers`` and PEFT.

Attention over short texts in bf16 on a CPU is computed in fp32: the backward pass of torch's kernel takes much longer in
bf16 than in fp32 there, four times as long at 50 tokens, twice at 200, as long at 400. Other lengths, number types and
devices are left to ``transformers``.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fedlight.stacking.dropout import DropoutMasks, seed_dropout

LONGEST = 256  # tokens
_MARK = "attends_in_fp32"


def use_fast_layers(network: nn.Module, masks: DropoutMasks) -> None:
    """Change attention and adapters of a base with adapters, and give the adapters dropout of those masks."""
    from fedlight.stacking.fused_lora import fuse_lora  # imports PEFT

    attend_in_fp32(network)
    seed_dropout(network, masks)
    fuse_lora(network)


def attend_in_fp32(network: nn.Module) -> None:
    """Let a network compute attention over short texts in bf16 on a CPU in fp32; others in the process stay as they are."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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
