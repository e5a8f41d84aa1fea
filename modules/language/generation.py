"""Completions of many prompts at once: left padding, a KV cache, and a random stream of their own."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from fedlight.modules.language.stopping import decode_behind, stop_at, until
from fedlight.modules.language.streams import own_stream
from fedlight.support.checks import check_range
from fedlight.support.torch_parts import eval_mode


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
    """Continues each prompt n times.

    Args:
        causal_lm: a ``transformers`` model.
        tokenizer: its tokenizer, with a padding token.
        prompts: texts; they are encoded as the training texts are, with the opening token only.
        n: completions per prompt, at least 1.
        temperature: 0 for greedy decoding.
        top_p: share of the probability to draw from, in (0, 1].
        max_new_tokens: most tokens of a completion.
        seed: of the draws. They depend on nothing but seed, model and the whole list of prompts.
        stop: texts in front of which a completion ends.
        strip: take white space away around the completions; code needs that at its beginning.

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
    prompt_batch = {
        name: part.to(causal_lm.device) for name, part in pad_left(rows, tokenizer.pad_token_id).items()
    }
    config = _generation_config(causal_lm, tokenizer, temperature, top_p, max_new_tokens)
    with own_stream(seed, causal_lm.device), eval_mode(causal_lm), torch.no_grad():
        read = _read_once(causal_lm, prompt_batch, copies, tokenizer.pad_token_id)
        width = prompt_batch["input_ids"].shape[1]
        stopping = {"stopping_criteria": [stop_at(tokenizer, stop, width)]} if stop else {}
        tokens = causal_lm.generate(**read, generation_config=config, **stopping)[:, width:]
    ends = config.eos_token_id or []
    written = [list(takewhile(lambda token: token not in ends, row)) for row in tokens.tolist()]
    if strip:
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    else:
        texts = decode_behind(tokenizer, [row for row in rows for _ in range(copies)], written)
    texts = [until(text, stop).strip() if strip else until(text, stop) for text in texts]
    return [texts[row : row + copies] * (n // copies) for row in range(0, len(texts), copies)]


def encode_prompts(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt, with the opening token where the tokenizer puts one, and without an end token."""
    opening = opening_ids(tokenizer)
    return [opening + ids for ids in tokenizer(list(prompts), add_special_tokens=False)["input_ids"]]


def fits(causal_lm: Any, tokenizer: Any, prompts: Sequence[str], new_tokens: int) -> list[bool]:
    """Whether each prompt fits into the model with so many tokens behind it."""
    limit = getattr(causal_lm.config, "max_position_embeddings", None)
    lengths = map(len, encode_prompts(tokenizer, prompts))
    return [limit is None or length + new_tokens <= limit for length in lengths]


def opening_ids(tokenizer: Any) -> list[int]:
    """The token that opens a text, where the tokenizer puts one: one id or none."""
    first: list[int] = tokenizer("x")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def pad_left(rows: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask``, both ``(batch, tokens)`` long.

    Example:
        >>> {name: part.tolist() for name, part in pad_left([[5, 6], [7]], pad_token_id=0).items()}
        {'input_ids': [[5, 6], [0, 7]], 'attention_mask': [[1, 1], [0, 1]]}
    """
    width = max(map(len, rows))
    ids = torch.tensor([[pad_token_id] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def _read_once(causal_lm: Any, texts: dict[str, Tensor], copies: int, pad_token_id: int) -> dict[str, Any]:
    """Arguments of ``generate`` for that many copies of each prompt, whose cache is computed once and then copied.

    ``num_return_sequences`` would read every copy anew: with four copies of 300 tokens that takes twice as long.
    """
    from transformers import GenerationConfig

    if copies == 1 or texts["input_ids"].shape[1] == 1:
        return {name: part.repeat_interleave(copies, dim=0) for name, part in texts.items()}
    # All but the last token: generation has to have one to begin with. The one that is made here is thrown away.
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
    return {
        **{name: part.repeat_interleave(copies, dim=0) for name, part in texts.items()},
        "past_key_values": cache,
    }


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
    """Everything that matters is said here, so that a model's own generation defaults cannot change it."""
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
