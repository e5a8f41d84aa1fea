"""Batched completion of prompts with left padding, a KV cache, random streams by client and stop texts."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlight.pretrained.openings import openings
from fedlight.support.checks import check_range
from fedlight.support.torch_parts import eval_mode, replaced
from fedlight.support.words import cut_at

STOP_MARGIN = 4
"""Tokens that are decoded besides those of a stop text: the first of a window may lose its blank."""
CONVERSATION = (("user", "first question"), ("assistant", "first answer"), ("user", "second question"))


class Request(NamedTuple):
    """Prompts of one client, and the seed of their draws."""

    prompts: Sequence[str]
    seed: int


def complete(
    causal_lm: Any,
    tokenizer: Any,
    requests: Sequence[Request],
    *,
    n: int = 1,
    temperature: float = 0.7,
    top_p: float = 1.0,
    max_new_tokens: int = 80,
    stop: Sequence[str] = (),
    strip: bool = True,
    set_rows: Callable[[list[int]], None] | None = None,
) -> list[list[list[str]]]:
    """Complete each prompt of each request n times, all in one batch: per request and prompt n texts without special tokens.

    Prompts are encoded as the training texts are, with the opening token only. Draws for a request depend on its seed, the
    model and its own list of prompts, not on the other requests. A temperature of 0 decodes greedily, and a completion ends
    before a text of ``stop``. White space around it goes, unless ``strip`` is off, as for code. ``set_rows`` is called
    before forward passes with the number of rows of each request that has prompts.

    Raises:
        ValueError: a prompt and its completion do not fit into the model, or a setting is out of range.
    """
    from transformers import GenerationConfig

    check_range("temperature", temperature, 0, float("inf"))
    check_range("top_p", top_p, 0, 1, above_low=True)
    check_range("n", n, 1, float("inf"))
    check_range("max_new_tokens", max_new_tokens, 1, float("inf"))
    _check_stop(stop)
    prompts = [prompt for request in requests for prompt in request.prompts]
    if not prompts:
        return [[] for _ in requests]
    rows = encode_prompts(tokenizer, prompts)
    _check_length(rows, max_new_tokens, getattr(causal_lm.config, "max_position_embeddings", None))
    copies = n if temperature > 0 else 1  # greedy completions are all the same
    counts, ends = [len(request.prompts) for request in requests], end_tokens(causal_lm, tokenizer)
    padded = pad_left(rows, tokenizer.pad_token_id)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=ends or None, pad_token_id=tokenizer.pad_token_id
    )
    options: dict[str, Any] = {"generation_config": config}
    if stop:
        options["stopping_criteria"] = [make_stopping(tokenizer, stop, padded["input_ids"].shape[1])]
    if temperature > 0:
        sizes, seeds = [count * copies for count in counts], [request.seed for request in requests]
        options["logits_processor"] = [_Draws(sizes, seeds, temperature, top_p, causal_lm.device)]
    tokens = _generate(causal_lm, padded, [count for count in counts if count], copies, options, set_rows)
    written = [list(takewhile(lambda token: token not in ends, row)) for row in tokens]
    if strip:
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    else:
        texts = decode_completions(tokenizer, [row for row in rows for _ in range(copies)], written)
    texts = [cut_at(text, stop).strip() if strip else cut_at(text, stop) for text in texts]
    by_prompt = iter([texts[row : row + copies] * (n // copies) for row in range(0, len(texts), copies)])
    return [[next(by_prompt) for _ in request.prompts] for request in requests]


def _generate(
    causal_lm: Any,
    padded: dict[str, Tensor],
    counts: list[int],
    copies: int,
    options: dict[str, Any],
    set_rows: Callable[[list[int]], None] | None,
) -> list[list[int]]:
    """Return the new tokens of each copy of each prompt, by ``generate`` of ``transformers``."""
    from transformers import GenerationConfig

    texts = {name: part.to(causal_lm.device) for name, part in padded.items()}
    # Else ``generate`` adds settings of the model's own config: forced, suppressed or unrepeated tokens, beams.
    plain = replaced(causal_lm, "generation_config", GenerationConfig())
    with eval_mode(causal_lm), torch.no_grad(), _dense_head(causal_lm), plain:
        if set_rows is not None:
            set_rows(counts)
        inputs = _encode_once(causal_lm, texts, copies, options["generation_config"].pad_token_id)
        if set_rows is not None:
            set_rows([count * copies for count in counts])
        return causal_lm.generate(**inputs, **options)[:, texts["input_ids"].shape[1] :].tolist()


@contextmanager
def _dense_head(causal_lm: Any) -> Iterator[None]:
    """Give the output head a copy of its input while the body runs."""
    head = causal_lm.get_output_embeddings()

    # ``generate`` passes a view with gaps, and torch then copies the frozen weights once for each text: with
    # a vocabulary of 49,152 that is half of the time of 16 short answers, and 1.8 GB.
    def make_dense(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # Not contiguous(), which leaves the strides of a single text as they are.
        return tuple(part.new_empty(part.shape).copy_(part) for part in inputs)

    hook = head.register_forward_pre_hook(make_dense)
    try:
        yield
    finally:
        hook.remove()


class _Draws:
    """Logits processor of ``generate`` that draws the next tokens, each request's from a separate stream.

    It leaves the drawn token alone possible, so that greedy decoding takes it. The draws of a single request are those of
    ``do_sample`` on a global stream with its seed.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        seeds: Sequence[int],
        temperature: float,
        top_p: float,
        device: torch.device,
    ) -> None:
        from transformers import TemperatureLogitsWarper, TopPLogitsWarper

        self.sizes = list(sizes)
        self.streams = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.warpers: list[Any] = [TemperatureLogitsWarper(float(temperature))]
        if top_p < 1:
            self.warpers.append(TopPLogitsWarper(top_p))

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        for warper in self.warpers:
            scores = warper(ids, scores)
        shares = scores.softmax(dim=-1).split(self.sizes)  # [rows, vocabulary] each
        drawn = [
            torch.multinomial(share, 1, generator=stream)
            for share, stream in zip(shares, self.streams, strict=True)
            if len(share)  # a request may have no prompts
        ]
        return torch.full_like(scores, -float("inf")).scatter_(1, torch.cat(drawn), 0.0)


def encode_prompts(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each prompt, with the opening token if the tokenizer adds one, without an end token."""
    # A tokenizer fails with an empty list.
    encoded = tokenizer(list(prompts), add_special_tokens=False)["input_ids"] if prompts else []
    return [before + ids for before, ids in zip(openings(tokenizer, prompts), encoded, strict=True)]


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
    """Return arguments of ``generate`` for copies of each prompt, whose cache is computed once and then copied."""
    from transformers import DynamicCache, GenerationConfig

    repeated = {name: part.repeat_interleave(copies, dim=0) for name, part in texts.items()}
    takes_cache = "cache" in inspect.signature(causal_lm.forward).parameters  # not that of OpenAI GPT
    if copies == 1 or texts["input_ids"].shape[1] == 1 or not takes_cache:  # no token before the last
        return repeated
    # The cache has all but the last token; generation begins there. The new token of this call is thrown away.
    config = GenerationConfig(max_new_tokens=1, return_dict_in_generate=True, pad_token_id=pad_token_id)
    heads = {name: part[:, :-1] for name, part in texts.items()}
    cache = causal_lm.generate(**heads, generation_config=config).cache
    if type(cache) is not DynamicCache:  # an architecture's own may have states that are not copied
        return repeated
    # ``num_return_sequences`` would encode every copy: four copies of 300 tokens take twice as long.
    cache.reorder_cache(torch.arange(len(heads["input_ids"])).repeat_interleave(copies))
    return {**repeated, "cache": cache}


def _check_length(rows: Sequence[Sequence[int]], max_new_tokens: int, limit: int | None) -> None:
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {index} is empty")
        if limit is not None and len(row) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {index} has {len(row)} tokens; with max_new_tokens={max_new_tokens} that is more than the "
                f"model's {limit}: shorten the prompt or lower max_new_tokens"
            )


def _check_stop(stop: Sequence[str]) -> None:
    if isinstance(stop, str):
        raise ValueError(
            f"stop={stop!r} is one text, whose letters would each end a completion: give [{stop!r}]"
        )
    if not all(stop):
        raise ValueError(f"stop={list(stop)}: an empty text would end every completion at once")


def make_stopping(tokenizer: Any, stop: Sequence[str], width: int) -> Callable[[Tensor, Any], Tensor]:
    """Return a stopping criterion of ``generate``: ``(batch,)`` bool, whether a completion has reached a stop text.

    ``width`` is the number of tokens of the padded prompts.
    """
    window = max(len(text.encode()) for text in stop) + STOP_MARGIN  # no token is shorter than a byte

    def stopped(ids: Tensor, scores: Any, **others: Any) -> Tensor:
        texts = tokenizer.batch_decode(ids[:, width:][:, -window:])
        return torch.tensor([any(ending in text for ending in stop) for text in texts], device=ids.device)

    return stopped


def decode_completions(
    tokenizer: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[str]:
    """Return the texts of completions with their leading blanks, which many tokenizers drop without the prompt."""
    plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    joined = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    starts = tokenizer.batch_decode([list(prompt) for prompt in prompts], **plain)
    texts = tokenizer.batch_decode(joined, **plain)
    return [text[len(start) :] for text, start in zip(texts, starts, strict=True)]


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens after which an answer is over, in ascending order.

    They are the end tokens of the model's generation config and of the tokenizer, and the added tokens that the chat
    template puts between an answer and the next question: the end of the turn, and the opening of the next one.
    """
    configured = model.generation_config.eos_token_id
    named = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}
    return sorted(named | turn_tokens(tokenizer))


def turn_tokens(tokenizer: Any) -> set[int]:
    """Return the added tokens between an answer and the next question; none without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return set()
    messages = [{"role": role, "content": content} for role, content in CONVERSATION]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    _, _, rest = text.partition(CONVERSATION[1][1])  # after the first answer
    between, mark, _ = rest.partition(CONVERSATION[2][1])
    if not mark:  # a template that leaves earlier turns out
        return set()
    added = tokenizer.added_tokens_decoder
    ids = tokenizer(between, add_special_tokens=False)["input_ids"]
    # Gemma adds line breaks, which stand between turns and within answers.
    return {token for token in ids if token in added and added[token].content.strip()}
