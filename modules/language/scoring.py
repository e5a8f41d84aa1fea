"""How likely texts are behind prompts: what multiple-choice benchmarks compare.

Prompt and continuation are encoded as one text, as in training, so that the border between the two is where the
tokenizer has it: a token that reaches over it belongs to the continuation. What several continuations have in front of
their last token is often the same (letters behind one multiple-choice question); it is read once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlight.evaluation.tasks.model import Likelihood
from fedlight.modules.language.generation import opening_ids
from fedlight.modules.language.readout import head_logits, hidden_states
from fedlight.support.checks import check_range
from fedlight.support.torch_parts import eval_mode


class Scored(NamedTuple):
    """Token ids of a prompt and its continuation, which begins at ``start``."""

    ids: list[int]
    start: int


def log_likelihoods(
    causal_lm: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    continuations: Sequence[Sequence[str]],
    batch_size: int = 16,
) -> list[list[Likelihood]]:
    """How likely each continuation is behind its prompt.

    Args:
        causal_lm: a ``transformers`` model.
        tokenizer: its fast tokenizer.
        prompts: texts; an empty one stands for the opening token, or for the end token where the tokenizer has none.
        continuations: per prompt its continuations, with the blank that stands between the two; what begins with one has
            the same tokens behind an empty prompt as behind another.
        batch_size: texts that are read at once.

    Returns:
        Per prompt a likelihood for each continuation.

    Raises:
        ValueError: a continuation is empty, or a text does not fit into the model.
    """
    pairs = [(prompt, one) for prompt, own in zip(prompts, continuations, strict=True) for one in own]
    each = iter(score(causal_lm, encode_continuations(tokenizer, pairs), batch_size))
    return [[next(each) for _ in own] for own in continuations]


def score(causal_lm: Any, texts: Sequence[Scored], batch_size: int) -> list[Likelihood]:
    """How likely the scored part of each text is behind the rest of it.

    Args:
        causal_lm: a ``transformers`` model.
        texts: token ids, none of them scored from its first token on.
        batch_size: texts that are read at once.

    Raises:
        ValueError: a text does not fit into the model.
    """
    check_lengths(texts, getattr(causal_lm.config, "max_position_embeddings", None))
    by_input: dict[tuple[int, ...], list[int]] = {}
    for index, text in enumerate(texts):
        by_input.setdefault(tuple(text.ids[:-1]), []).append(index)
    inputs = sorted(by_input, key=len, reverse=True)
    found: dict[int, Likelihood] = {}
    with eval_mode(causal_lm), torch.no_grad():
        for at in range(0, len(inputs), batch_size):
            batch = inputs[at : at + batch_size]
            for ids, hidden in zip(batch, _hidden(causal_lm, batch), strict=True):
                first = min(texts[index].start for index in by_input[ids])
                log_probs = head_logits(causal_lm, hidden[first - 1 : len(ids)]).log_softmax(dim=-1)
                for index in by_input[ids]:
                    start = texts[index].start
                    found[index] = likelihood(log_probs[start - first :], texts[index].ids[start:])
    return [found[index] for index in range(len(texts))]


def free_energies(
    causal_lm: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    answers: Sequence[str],
    temperature: float = 1.0,
    batch_size: int = 16,
) -> list[float]:
    """Mean free energy of each answer's tokens behind its prompt: low where the model is at home.

    W. Liu et al., "Energy-based Out-of-distribution Detection", NeurIPS 2020, https://arxiv.org/abs/2010.03759, eq. 4, token
    by token: the logits are those from which each token of the answer was, or would be, drawn.

    Args:
        causal_lm: a ``transformers`` model.
        tokenizer: its fast tokenizer.
        prompts: texts.
        answers: one for each, with the blank that stands between the two.
        temperature: T, above 0.
        batch_size: texts that are read at once.

    Raises:
        ValueError: an answer is empty, a text does not fit into the model, or the temperature is out of range.
    """
    check_range("temperature", temperature, 0, float("inf"), above_low=True)
    texts = encode_pairs(tokenizer, list(zip(prompts, answers, strict=True)))
    check_lengths(texts, getattr(causal_lm.config, "max_position_embeddings", None))
    order = sorted(range(len(texts)), key=lambda index: len(texts[index].ids), reverse=True)
    found = [0.0] * len(texts)
    with eval_mode(causal_lm), torch.no_grad():
        for at in range(0, len(order), batch_size):
            batch = order[at : at + batch_size]
            inputs = [texts[index].ids[:-1] for index in batch]
            for index, ids, hidden in zip(batch, inputs, _hidden(causal_lm, inputs), strict=True):
                logits = head_logits(causal_lm, hidden[texts[index].start - 1 : len(ids)])
                found[index] = float(free_energy(logits, temperature).mean())
    return found


def free_energy(logits: Tensor, temperature: float) -> Tensor:
    """``-T log sum exp(logits / T)`` over the vocabulary.

    Args:
        logits: ``(..., vocabulary)``.
        temperature: T, above 0.

    Returns:
        ``(...)``.

    Example:
        >>> free_energy(torch.tensor([[0.0, 0.0], [3.0, 1.0]]), temperature=1.0)
        tensor([-0.6931, -3.1269])
        >>> free_energy(torch.tensor([3.0, 1.0]), temperature=2.0)
        tensor(-3.6265)
    """
    return -temperature * (logits / temperature).logsumexp(dim=-1)


def encode_pairs(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Scored]:
    """Prompt and continuation as one text, with the opening token where the tokenizer puts one.

    Raises:
        ValueError: a continuation is empty.
    """
    if not pairs:
        return []
    opening = opening_ids(tokenizer)
    encodings = tokenizer([prompt + text for prompt, text in pairs], add_special_tokens=False).encodings
    scored = []
    for encoding, (prompt, text) in zip(encodings, pairs, strict=True):
        starts = [index for index, (_, end) in enumerate(encoding.offsets) if end > len(prompt)]
        if not starts:
            raise ValueError(f"nothing to score: the continuation {text!r} of {prompt[-40:]!r} has no tokens")
        # The first token of a text has nothing before it that would say how likely it is.
        before = opening or ([] if starts[0] else [first_id(tokenizer)])
        scored.append(Scored(before + encoding.ids, len(before) + starts[0]))
    return scored


def encode_continuations(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Scored]:
    """As :func:`encode_pairs`, but what begins with a blank has the same tokens without a prompt as behind one.

    Tokenizers such as Llama's put a blank of their own in front of a text, so that alone it would begin with two.
    """
    fronts = [prompt or (":" if text.startswith(" ") else "") for prompt, text in pairs]
    texts = [text for _, text in pairs]
    scored = encode_pairs(tokenizer, list(zip(fronts, texts, strict=True)))
    for index, ((prompt, _), front) in enumerate(zip(pairs, fronts, strict=True)):
        if front and not prompt:
            before = opening_ids(tokenizer) or [first_id(tokenizer)]
            scored[index] = Scored(before + scored[index].ids[scored[index].start :], len(before))
    return scored


def first_id(tokenizer: Any) -> int:
    """The token that stands for no text at all: the opening one, or the end token of a text before."""
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return int(next(token for token in ids if token is not None))


def check_lengths(texts: Sequence[Scored], limit: int | None) -> None:
    """Refuses what does not fit into the model.

    Raises:
        ValueError: it does not.
    """
    longest = max((len(text.ids) - 1 for text in texts), default=0)
    if limit is not None and longest > limit:
        raise ValueError(
            f"a prompt and its continuation have {longest} tokens, more than the model's {limit}: "
            "shorten the prompt or show fewer examples"
        )


def likelihood(log_probs: Tensor, ids: Sequence[int]) -> Likelihood:
    """Of a text, from the log-probabilities of all tokens at each place.

    Args:
        log_probs: ``(tokens, vocabulary)``.
        ids: token ids, ``(tokens,)``.

    Example:
        >>> likelihood(torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log(), [1, 0])
        Likelihood(log_prob=-0.98..., tokens=2, greedy=True)
    """
    wanted = torch.tensor(ids, device=log_probs.device)
    own = log_probs.gather(1, wanted[:, None])[:, 0]
    return Likelihood(float(own.sum()), len(ids), bool((log_probs.argmax(dim=1) == wanted).all()))


def _hidden(causal_lm: Any, batch: Sequence[Sequence[int]]) -> Tensor:
    """``(batch, tokens, hidden)``; what stands behind a text's last token is padding."""
    width = max(map(len, batch))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in batch], device=causal_lm.device)
    lengths = torch.tensor([len(row) for row in batch], device=causal_lm.device)
    return hidden_states(causal_lm, ids, (torch.arange(width, device=ids.device) < lengths[:, None]).long())
