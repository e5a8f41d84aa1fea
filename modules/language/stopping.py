"""Where a completion ends besides the end token: at a text, such as the next question of a few-shot prompt."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

MARGIN = 4
"""Tokens that are decoded besides those of a stop text: the first of a window may lose its blank."""


def until(text: str, stop: Sequence[str]) -> str:
    r"""What stands in front of the first of the stop texts.

    Example:
        >>> until("4\n\nQuestion: 5", ["Question:", "\n\n"]), until("4", ["\n\n"])
        ('4', '4')
    """
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))]


def stop_at(tokenizer: Any, stop: Sequence[str], width: int) -> Callable[[Tensor, Any], Tensor]:
    """What ``generate`` asks after each token: whether a text behind the prompt has come to a stop, ``(batch,)`` bool.

    Args:
        tokenizer: for decoding.
        stop: texts, none of them empty.
        width: tokens of the padded prompts.

    Raises:
        ValueError: a stop text is empty.
    """
    if not all(stop):
        raise ValueError(f"stop={list(stop)}: an empty text would end every completion at once")
    window = max(len(text.encode()) for text in stop) + MARGIN  # no token is shorter than a byte

    def stopped(ids: Tensor, scores: Any, **others: Any) -> Tensor:
        texts = tokenizer.batch_decode(ids[:, width:][:, -window:])
        return torch.tensor([any(one in text for one in stop) for text in texts], device=ids.device)

    return stopped


def decode_behind(
    tokenizer: Any, prompts: Sequence[Sequence[int]], written: Sequence[Sequence[int]]
) -> list[str]:
    """The texts of completions with all their blanks: many tokenizers drop one in front of a text's first word.

    Args:
        tokenizer: for decoding.
        prompts: token ids of each prompt.
        written: token ids of what follows each.
    """
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    whole = [[*prompt, *own] for prompt, own in zip(prompts, written, strict=True)]
    heads = tokenizer.batch_decode([list(prompt) for prompt in prompts], **plain)
    return [
        text[len(head) :] for text, head in zip(tokenizer.batch_decode(whole, **plain), heads, strict=True)
    ]
