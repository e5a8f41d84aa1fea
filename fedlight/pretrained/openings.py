"""The first token of a text: where encoding adds it, a rendered text must not hold it too."""

from typing import Any


def opening_ids(tokenizer: Any) -> list[int]:
    """Return the token that the tokenizer puts before every text: one id or none."""
    first: list[int] = tokenizer("x", return_attention_mask=False)["input_ids"][:1]
    return first if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else []


def without_opening(tokenizer: Any, text: str) -> str:
    """Return a text of the chat template as it has to be given to an encoding that adds the opening token.

    A tokenizer that adds none leaves the token to its template, where it may be more than a mark of the beginning: that of
    SmolLM2 opens every turn of a chat with it.
    """
    return text.removeprefix(tokenizer.bos_token) if opening_ids(tokenizer) else text
