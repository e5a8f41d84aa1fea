"""Batched completion of prompts with left padding, a KV cache, an isolated random stream and stop texts."""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from fedlight.modules.language.streams import own_stream
from fedlight.support.checks import check_range
from fedlight.support.torch_parts import eval_mode

STOP_MARGIN = 4
"""Tokens that are decoded besides those of a stop text: the first of a window may lose its blank."""


def complete(
    causal_lm: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    n: int,
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    seed: int,
    stop: Sequence[str] = (),
    strip: bool = True,
) -> list[list[str]]:
    """Complete each prompt n times.

    Args:
        causal_lm: a ``transformers`` model.
        tokenizer: its tokenizer, with a padding token.
        prompts: texts; they are encoded as the training texts are, with the opening token only.
        n: completions per prompt, at least 1.
        temperature: sampling temperature; 0 for greedy decoding.
        top_p: share of the probability to draw from, in (0, 1].
        max_new_tokens: most tokens of a completion, at least 1.
        seed: seed of the draws, which depend only on it, the model and the whole list of prompts.
        stop: texts before which a completion ends, such as the next question of a few-shot prompt.
        strip: remove white space around the completions; off for code, where leading blanks count.

    Returns:
        Per prompt n texts without special tokens.

    Raises:
        ValueError: a prompt and its completion do not fit into the model, or a setting is out of range.
    """
    check_range("temperature", temperature, 0, float("inf"))
    check_range("top_p", top_p, 0, 1, above_low=True)
    check_range("n", n, 1, float("inf"))
    check_range("max_new_tokens", max_new_tokens, 1, float("inf"))
    if not prompts:
        return []
    rows = encode_prompts(tokenizer, prompts)
    _check_length(rows, max_new_tokens, getattr(causal_lm.config, "max_position_embeddings", None))
    copies = n if temperature > 0 else 1  # greedy completions are all the same
    padded = {
        name: part.to(causal_lm.device) for name, part in pad_left(rows, tokenizer.pad_token_id).items()
    }
    config = _generation_config(causal_lm, tokenizer, temperature, top_p, max_new_tokens)
    with own_stream(seed, causal_lm.device), eval_mode(causal_lm), torch.no_grad():
        inputs = _encode_once(causal_lm, padded, copies, tokenizer.pad_token_id)
        width = padded["input_ids"].shape[1]
        stopping = {"stopping_criteria": [make_stopping(tokenizer, stop, width)]} if stop else {}
        tokens = causal_lm.generate(**inputs, generation_config=config, **stopping)[:, width:]
    ends = config.eos_token_id or []
    written = [list(takewhile(lambda token: token not in ends, row)) for row in tokens.tolist()]
    if strip:
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    else:
        texts = decode_completions(tokenizer, [row for row in rows for _ in range(copies)], written)
    texts = [cut_at(text, stop).strip() if strip else cut_at(text, stop) for text in texts]
    return [texts[row : row + copies] * (n // copies) for row in range(0, len(texts), copies)]


def encode_prompts(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each prompt, with the opening token if the tokenizer adds one, without an end token."""
    opening = opening_ids(tokenizer)
    return [opening + ids for ids in tokenizer(list(prompts), add_special_tokens=False)["input_ids"]]


def opening_ids(tokenizer: Any) -> list[int]:
    """Return the token with which the tokenizer opens a text: one id or none."""
    first: list[int] = tokenizer("x")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def pad_left(rows: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, Tensor]:
    """Return ``input_ids`` and ``attention_mask``, both ``(batch, tokens)`` int64, padded on the left.

    Examples:
        >>> {name: part.tolist() for name, part in pad_left([[5, 6], [7]], pad_token_id=0).items()}
        {'input_ids': [[5, 6], [0, 7]], 'attention_mask': [[1, 1], [0, 1]]}
    """
    width = max(map(len, rows))
    ids = torch.tensor([[pad_token_id] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def _encode_once(causal_lm: Any, texts: dict[str, Tensor], copies: int, pad_token_id: int) -> dict[str, Any]:
    """Return arguments of ``generate`` for copies of each prompt, whose cache is computed once and then copied.

    ``num_return_sequences`` would encode every copy: with four copies of 300 tokens that takes twice as long.
    """
    from transformers import GenerationConfig

    repeated = {name: part.repeat_interleave(copies, dim=0) for name, part in texts.items()}
    if copies == 1 or texts["input_ids"].shape[1] == 1:
        return repeated
    # The cache has all but the last token, with which generation begins. The new token of this call is thrown away.
    config = GenerationConfig(
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
        use_cache=True,
        pad_token_id=pad_token_id,
    )
    heads = {name: part[:, :-1] for name, part in texts.items()}
    cache = causal_lm.generate(**heads, generation_config=config).past_key_values
    cache.batch_repeat_interleave(copies)
    return {**repeated, "past_key_values": cache}


def _check_length(rows: Sequence[Sequence[int]], max_new_tokens: int, limit: int | None) -> None:
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {index} is empty")
        if limit is not None and len(row) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {index} has {len(row)} tokens; with max_new_tokens={max_new_tokens} that is more than the "
                f"model's {limit}: shorten the prompt or lower max_new_tokens"
            )


def _generation_config(
    causal_lm: Any, tokenizer: Any, temperature: float, top_p: float, max_new_tokens: int
) -> Any:
    """Return a config that sets everything that matters, so that a model's own defaults cannot change it."""
    from transformers import GenerationConfig

    own = causal_lm.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    drawn = (
        {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {}
    )
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
        repetition_penalty=1.0,
        **{"do_sample": False, **drawn},
    )


def cut_at(text: str, stop: Sequence[str]) -> str:
    r"""Return the text before the first stop text.

    Examples:
        >>> cut_at("4\n\nQuestion: 5", ["Question:", "\n\n"]), cut_at("4", ["\n\n"])
        ('4', '4')
    """
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))]


def make_stopping(tokenizer: Any, stop: Sequence[str], width: int) -> Callable[[Tensor, Any], Tensor]:
    """Return a stopping criterion of ``generate``: ``(batch,)`` bool, whether a completion has reached a stop text.

    Args:
        tokenizer: for decoding.
        stop: texts, none of them empty.
        width: tokens of the padded prompts.

    Raises:
        ValueError: a stop text is empty.
    """
    if not all(stop):
        raise ValueError(f"stop={list(stop)}: an empty text would end every completion at once")
    window = max(len(text.encode()) for text in stop) + STOP_MARGIN  # no token is shorter than a byte

    def stopped(ids: Tensor, scores: Any, **others: Any) -> Tensor:
        texts = tokenizer.batch_decode(ids[:, width:][:, -window:])
        return torch.tensor([any(one in text for one in stop) for text in texts], device=ids.device)

    return stopped


def decode_completions(
    tokenizer: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[str]:
    """Return the texts of completions with their leading blanks, which many tokenizers drop without the prompt.

    Args:
        tokenizer: for decoding.
        prompts: token ids of each prompt.
        completions: token ids after each prompt.
    """
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    joined = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    starts = tokenizer.batch_decode([list(prompt) for prompt in prompts], **plain)
    texts = tokenizer.batch_decode(joined, **plain)
    return [text[len(start) :] for text, start in zip(texts, starts, strict=True)]
