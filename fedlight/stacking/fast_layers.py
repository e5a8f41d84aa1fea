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
    from transformers import AttentionInterface

    from fedlight.stacking.fused_lora import fuse_lora  # imports PEFT

    # A name of its own would lead some architectures into branches that are meant for other kernels than "sdpa".
    AttentionInterface.register("sdpa", _attend)
    for layer in network.modules():
        setattr(layer, _MARK, True)
    seed_dropout(network, masks)
    fuse_lora(network)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return the result of ``transformers``' own function, ``(texts, tokens, heads, width)``, in the type of ``query``."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    kind, tokens = query.dtype, query.shape[2]
    short = kind == torch.bfloat16 and query.device.type in ("cpu", "meta") and 1 < tokens <= LONGEST
    if not short or not getattr(module, _MARK, False):  # layers of other networks in this process
        attended, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
        return attended, None
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.float()  # added to the scores
    attended, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), mask, **options)
    return attended.to(kind), None
