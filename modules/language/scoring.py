"""Log-likelihoods and free energies of texts after prompts, as multiple-choice benchmarks compare them.

Prompt and continuation are encoded as one text, as in training, so that the tokenizer decides the border between them: a
token across it belongs to the continuation. Continuations that differ in their last token only (letters after one
multiple-choice question) are computed in one pass.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedlight.evaluation.tasks.model import Likelihood
from fedlight.modules.functional import IGNORED
from fedlight.modules.language.readout import HiddenStates, SharedPrefix, head_logits, hidden_states
from fedlight.pretrained.openings import opening_ids, openings
from fedlight.stacking.shared_rows import LEAST_SHARED
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
    shared_prefix: SharedPrefix | None = None,
) -> list[list[Likelihood]]:
    """Return for each prompt how likely each of its continuations is, which begins with the blank between the two.

    An empty prompt stands for the opening token, or for the end token where the tokenizer has none; a continuation that
    begins with a blank has the same tokens after it as after another prompt. ``shared_prefix`` computes continuations of one
    prompt in one row where that saves time.

    Raises:
        ValueError: a continuation is empty, a text does not fit into the model, or nothing stands for an empty prompt.
    """
    pairs = [(prompt, text) for prompt, texts in zip(prompts, continuations, strict=True) for text in texts]
    each = iter(score(causal_lm, encode_continuations(tokenizer, pairs), batch_size, shared_prefix))
    return [[next(each) for _ in texts] for texts in continuations]


def score(
    causal_lm: Any, texts: Sequence[Scored], batch_size: int, shared_prefix: SharedPrefix | None = None
) -> list[Likelihood]:
    """Return how likely the scored part of each text, which may not begin at its first token, is after the rest.

    Raises:
        ValueError: a text does not fit into the model.
    """
    _check_lengths(causal_lm, texts)
    by_input: dict[tuple[int, ...], list[int]] = {}
    for index, text in enumerate(texts):
        by_input.setdefault(tuple(text.ids[:-1]), []).append(index)  # letters after one question share a pass
    starts = {ids: texts[places[0]].start for ids, places in by_input.items()}
    shares = shared_prefix is not None and shared_prefix.setting == "auto"
    inputs = _order(starts, LEAST_SHARED if shares else None)
    compute = hidden_states if shared_prefix is None else shared_prefix.neighbours
    scores: dict[int, Likelihood] = {}
    with eval_mode(causal_lm), torch.no_grad():
        for at in range(0, len(inputs), batch_size):
            batch = inputs[at : at + batch_size]
            for ids, hidden in zip(batch, _compute_hidden(causal_lm, batch, compute), strict=True):
                first = min(texts[index].start for index in by_input[ids])  # prompts may differ
                log_probs = head_logits(causal_lm, hidden[first - 1 : len(ids)]).log_softmax(dim=-1)
                for index in by_input[ids]:
                    start = texts[index].start
                    wanted = torch.tensor(texts[index].ids[start:], device=log_probs.device)
                    answer = log_probs[start - first :]  # [continuation, vocabulary]
                    each = answer.gather(1, wanted[:, None])[:, 0]
                    greedy = bool((answer.argmax(dim=1) == wanted).all())
                    scores[index] = Likelihood(float(each.sum()), len(wanted), greedy, tuple(each.tolist()))
    return [scores[index] for index in range(len(texts))]


def _order(starts: Mapping[tuple[int, ...], int], least_shared: int | None) -> list[tuple[int, ...]]:
    """Return inputs, the longest first, but those after one prompt of ``least_shared`` tokens as neighbours.

    ``starts``: token ids of each input -> the place where its scored part begins.
    """
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for ids, start in starts.items():
        alike = least_shared is not None and start >= least_shared
        groups.setdefault(ids[:start] if alike else ids, []).append(ids)
    longest_first = sorted(groups.values(), key=lambda group: -max(map(len, group)))  # little padding
    return [ids for group in longest_first for ids in group]


def free_energies(
    causal_lm: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    answers: Sequence[str],
    temperature: float = 1.0,
    batch_size: int = 16,
) -> list[float]:
    """Return the mean free energy of each answer's tokens after its prompt, low for texts like the training data.

    W. Liu et al., "Energy-based Out-of-distribution Detection", NeurIPS 2020, https://arxiv.org/abs/2010.03759, eq. 4, ``-T
    log sum exp(logits / T)``, with the logits that predict each token of the answer, which begins with the blank after the
    prompt. The temperature T is above 0.

    Raises:
        ValueError: an answer is empty, a text does not fit into the model, or the temperature is out of range.
    """
    check_range("temperature", temperature, 0, float("inf"), above_low=True)
    texts = encode_pairs(tokenizer, list(zip(prompts, answers, strict=True)))
    _check_lengths(causal_lm, texts)
    order = sorted(range(len(texts)), key=lambda index: len(texts[index].ids), reverse=True)
    means = [0.0] * len(texts)
    with eval_mode(causal_lm), torch.no_grad():
        for at in range(0, len(order), batch_size):
            batch = order[at : at + batch_size]
            inputs = [texts[index].ids[:-1] for index in batch]
            for index, ids, hidden in zip(batch, inputs, _compute_hidden(causal_lm, inputs), strict=True):
                logits = head_logits(causal_lm, hidden[texts[index].start - 1 : len(ids)])
                energies = -temperature * (logits / temperature).logsumexp(dim=-1)  # eq. 4
                means[index] = float(energies.mean())
    return means


def encode_pairs(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Scored]:
    """Return prompt and continuation as one text, with the opening token if the tokenizer adds one.

    Raises:
        ValueError: a continuation is empty.
    """
    if not pairs:
        return []
    texts = [prompt + text for prompt, text in pairs]
    encodings = tokenizer(texts, add_special_tokens=False).encodings
    scored = []
    for opening, encoding, (prompt, text) in zip(openings(tokenizer, texts), encodings, pairs, strict=True):
        starts = [index for index, (_, end) in enumerate(encoding.offsets) if end > len(prompt)]
        if not starts:
            raise ValueError(f"nothing to score: the continuation {text!r} of {prompt[-40:]!r} has no tokens")
        # The first token of a text has nothing before it that would predict it.
        before = opening or ([] if starts[0] else [_first_id(tokenizer)])
        scored.append(Scored(before + encoding.ids, len(before) + starts[0]))
    return scored


def response_batch(
    tokenizer: Any, pairs: Sequence[tuple[str, str]], device: torch.device
) -> dict[str, Tensor]:
    """Return a batch for SFT of continuations after their prompts, encoded as by `encode_pairs`.

    Returns:
        ``input_ids``, ``attention_mask`` and ``labels``, each ``(batch, tokens)`` int64 and padded on the right; labels are
        -100 on prompt and padding.
    """
    texts = encode_pairs(tokenizer, pairs)
    ids = pad_sequence([torch.tensor(text.ids, device=device) for text in texts], batch_first=True)
    starts, ends = torch.tensor([[text.start, len(text.ids)] for text in texts], device=device).split(
        1, dim=1
    )
    places = torch.arange(ids.shape[1], device=device)
    labels = ids.where((places >= starts) & (places < ends), IGNORED)
    return {"input_ids": ids, "attention_mask": (places < ends).long(), "labels": labels}


def encode_continuations(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[Scored]:
    """Encode as `encode_pairs`, but a text that begins with a blank has the same tokens with and without a prompt.

    Tokenizers such as Llama's add a blank before a text, so that without a prompt it would begin with two.
    """
    fronts = [prompt or (":" if text.startswith(" ") else "") for prompt, text in pairs]  # Llama's adds one
    texts = [text for _, text in pairs]
    scored = encode_pairs(tokenizer, list(zip(fronts, texts, strict=True)))
    for index, ((prompt, _), front) in enumerate(zip(pairs, fronts, strict=True)):
        if front and not prompt:
            before = opening_ids(tokenizer) or [_first_id(tokenizer)]
            scored[index] = Scored(before + scored[index].ids[scored[index].start :], len(before))
    return scored


def _first_id(tokenizer: Any) -> int:
    """Return the token that stands for an empty text: the opening token, or the end token of an earlier text."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ValueError(
        f"nothing is before a text without a prompt: tokenizer {tokenizer.name_or_path!r} has neither bos_token nor "
        "eos_token; set one in its tokenizer_config.json"
    )


def _check_lengths(causal_lm: Any, texts: Sequence[Scored]) -> None:
    limit = getattr(causal_lm.config, "max_position_embeddings", None)
    longest = max((len(text.ids) - 1 for text in texts), default=0)
    if limit is not None and longest > limit:
        raise ValueError(
            f"a prompt and its continuation have {longest} tokens, more than the model's {limit}: "
            "shorten the prompt or show fewer examples"
        )


def _compute_hidden(
    causal_lm: Any, batch: Sequence[Sequence[int]], compute: HiddenStates = hidden_states
) -> Tensor:
    """Return hidden states of texts padded on the right, ``(batch, tokens, hidden)``."""
    width = max(map(len, batch))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in batch], device=causal_lm.device)
    lengths = torch.tensor([len(row) for row in batch], device=causal_lm.device)
    return compute(causal_lm, ids, (torch.arange(width, device=ids.device) < lengths[:, None]).long())
