"""Attention over short texts in bf16 on a CPU, whose products are computed in fp32.

The backward pass of torch's kernel takes much longer in bf16 than in fp32 where texts are short: four times as long at
50 tokens, twice at 200, as long at 400. Other lengths, types and devices are left to ``transformers``.
"""

from typing import Any

import torch
from torch import Tensor, nn

LONGEST = 256  # tokens
_MARK = "attends_in_fp32"


def attend_in_fp32(network: nn.Module) -> None:
    """Let the layers of a network compute attention over short texts in bf16 on a CPU in fp32."""
    from transformers import AttentionInterface

    # A name of its own would lead some architectures into branches that are meant for other kernels than "sdpa".
    AttentionInterface.register("sdpa", _attend)
    for layer in network.modules():
        setattr(layer, _MARK, True)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return the result of ``transformers``' own function, ``(texts, tokens, heads, width)``, in the type of ``query``."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    kind, tokens = query.dtype, query.shape[2]
    short = kind == torch.bfloat16 and query.device.type == "cpu" and 1 < tokens <= LONGEST
    if not short or not getattr(module, _MARK, False):  # layers of other networks in this process
        attended, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
        return attended, None
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.float()  # added to the scores
    attended, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), mask, **options)
    return attended.to(kind), None
