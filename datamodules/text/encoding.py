"""Comparisons and responses as token ids, in the three forms that the modules read.

* **choice**: the whole comparison as one text for a causal language model, up to the place of the choice. It is
  encoded with its ``" A"`` and the last token is dropped, so that the next token is the choice token whatever
  the tokenizer does with blanks.
* **pair**: ``[CLS] prompt [SEP] A [SEP] B [SEP]`` for an encoder with a 2-class head; prompt and A are segment
  0, B is segment 1.
* **responses**: prompt, response and the end-of-sequence token, with the length of the prompt, for losses on
  the response alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlight.datamodules.rows.votes import Comparison
from fedlight.datamodules.text.templates import Parts, Template
from fedlight.datamodules.text.tokens import TokenTable, encode, end_id, fit_texts, leading_ids

NOTHING = np.empty(0, dtype=np.int32)


@dataclass
class Encoded:
    """Token sequences, in order; one that does not fit is empty.

    Attributes:
        table: the sequences.
        marks: per sequence where segment 1 (pair) or the response (responses) begins, ``(sequences,)``; 0 for choice.
        kept: per sequence whether it fits, ``(sequences,)``.
        trimmed: sequences that lost text.
    """

    table: TokenTable
    marks: np.ndarray
    kept: np.ndarray
    trimmed: int

    def both_kept(self) -> np.ndarray:
        """For two sequences per comparison: whether both fit, ``(comparisons,)``."""
        return np.asarray(self.kept.reshape(-1, 2).all(axis=1))


def choice_ids(tokenizer: Any, template: Template, choices: tuple[str, str] = ("A", "B")) -> tuple[int, int]:
    """The tokens of the two choices in their place.

    Raises:
        ValueError: the two are not one distinct token each.
    """
    tail = template.text.rpartition("}")[2]
    with_a, with_b = (encoding.ids for encoding in encode(tokenizer, [f"{tail} {word}" for word in choices]))
    if len(with_a) != len(with_b) or with_a[:-1] != with_b[:-1] or with_a[-1] == with_b[-1]:
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} encodes {tail.strip()!r} + ' {choices[0]}' and ' {choices[1]}' as "
            f"{with_a} and {with_b}: they must differ in the last token alone. Set other choices "
            f"(now {list(choices)}), for example [a, b], another ending of the template, or another tokenizer."
        )
    return with_a[-1], with_b[-1]


def encode_choice(
    tokenizer: Any,
    template: Template,
    comparisons: Sequence[Comparison],
    max_tokens: int,
    choices: tuple[str, str] = ("A", "B"),
) -> Encoded:
    """Comparisons for a causal model: sequences 2c and 2c + 1 show comparison c in its own and in the swapped order.

    Args:
        tokenizer: a fast tokenizer.
        template: with slots for both answers.
        comparisons: what to encode.
        max_tokens: most tokens of a sequence.
        choices: the words of which one follows the text.

    Raises:
        ValueError: a choice is not one token, or not the last.
    """
    letter = choice_ids(tokenizer, template, choices)[0]
    leading = leading_ids(tokenizer)
    texts = [
        template.render({**comparison.fields, "response_a": a, "response_b": b}, ending=f" {choices[0]}")
        for comparison in comparisons
        for a, b in ((comparison.first, comparison.second), (comparison.second, comparison.first))
    ]
    sequences, trimmed = [], 0
    for text, fitted in zip(texts, fit_texts(tokenizer, texts, max_tokens - len(leading) + 1), strict=True):
        if fitted is not None and fitted.ids[-1] != letter:
            raise ValueError(
                f"the choice is not the last token of {text.text[-40:]!r}: the tokenizer merges it with the "
                "text before it."
            )
        trimmed += fitted is not None and fitted.parts is not text
        sequences.append(NOTHING if fitted is None else np.concatenate([leading, fitted.ids[:-1]]))
    return _encoded(sequences, [0] * len(sequences), trimmed)


def encode_responses(
    tokenizer: Any,
    template: Template,
    fields: Sequence[Mapping[str, str]],
    responses: Sequence[str],
    max_tokens: int,
    pairs: bool = False,
) -> Encoded:
    """Prompt, a blank, response, end. The response is never cut; ``marks`` are the lengths of the prompts in tokens.

    Args:
        tokenizer: a fast tokenizer.
        template: ends where the response begins.
        fields: the slots' texts of each sequence.
        responses: as many.
        max_tokens: most tokens of a sequence, the end token included.
        pairs: sequences 2c and 2c + 1 answer the same prompt, and see the same prompt also where it is cut.
    """
    leading, end = leading_ids(tokenizer), np.array([end_id(tokenizer)], dtype=np.int32)
    blank = "" if template.text[-1:].isspace() else " "
    endings = [blank + response for response in responses]
    texts = [template.render(slots, ending) for slots, ending in zip(fields, endings, strict=True)]
    budget = max_tokens - len(leading) - 1
    shared = _shared_cuts(tokenizer, texts, budget) if pairs else texts
    sequences, marks, trimmed = [], [], 0
    for text, ending, fitted in zip(texts, endings, fit_texts(tokenizer, shared, budget), strict=True):
        if fitted is None:
            sequences.append(NOTHING)
            marks.append(0)
            continue
        # A token that reaches over the border belongs to the response: the prompt alone would not have it.
        prompt_end = len(fitted.parts.text) - len(ending)
        marks.append(len(leading) + fitted.first_token_from(prompt_end))
        sequences.append(np.concatenate([leading, fitted.ids, end]))
        trimmed += fitted.parts != text
    return _encoded(sequences, marks, trimmed)


def encode_pair(
    tokenizer: Any,
    template: Template,
    comparisons: Sequence[Comparison],
    max_tokens: int,
    truncate_answers: bool = False,
) -> Encoded:
    """Comparisons for an encoder: sequences 2c and 2c + 1 show comparison c in its own and in the swapped order.

    The prompt is cut first, if need be to nothing. If that is not enough the comparison does not fit, unless
    ``truncate_answers``: then the longer answer loses its end until both are equally long, then both do.

    Args:
        tokenizer: a fast tokenizer with a separator (or end) token.
        template: text of the first part, from the slots of the prompt; an empty text leaves the first part out.
        comparisons: what to encode.
        max_tokens: most tokens of a sequence.
        truncate_answers: see above.
    """
    opening, separator = _separators(tokenizer)
    prompts = _encode_once(tokenizer, [template.render(comparison.fields).text for comparison in comparisons])
    firsts = _encode_once(tokenizer, [comparison.first for comparison in comparisons])
    seconds = _encode_once(tokenizer, [comparison.second for comparison in comparisons])
    sequences, marks, trimmed = [], [], 0
    for prompt, first, second in zip(prompts, firsts, seconds, strict=True):
        room, full = max_tokens - len(opening) - 2 * len(separator), len(prompt) + len(first) + len(second)
        if truncate_answers:
            first, second = _equally_short(first, second, room)
        room -= len(first) + len(second)
        left = prompt[: max(room - len(separator), 0)]
        trimmed += 2 * (room >= 0 and len(left) + len(first) + len(second) < full)
        head = [opening, left, separator] if len(left) else [opening]
        for a, b in ((first, second), (second, first)):
            segments = [np.concatenate([*head, a, separator]), np.concatenate([b, separator])]
            sequences.append(np.concatenate(segments) if room >= 0 else NOTHING)
            marks.append(len(segments[0]) if room >= 0 else 0)
    return _encoded(sequences, marks, trimmed)


def _encoded(sequences: list[np.ndarray], marks: list[int], trimmed: int) -> Encoded:
    table = TokenTable(sequences)
    return Encoded(table, np.array(marks, dtype=np.int64), table.lengths > 0, trimmed)


def _shared_cuts(tokenizer: Any, texts: list[Parts], budget: int) -> list[Parts]:
    """The texts of a pair cut alike: to the shorter of what fits with the one and with the other response."""
    kept = [None if fitted is None else fitted.kept for fitted in fit_texts(tokenizer, texts, budget)]
    shared = list(texts)
    for one in range(0, len(texts), 2):
        a, b = kept[one], kept[one + 1]
        if a is not None and b is not None and a != b:
            shared[one : one + 2] = [text.cut(min(a, b)) for text in texts[one : one + 2]]
    return shared


def _separators(tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    opening = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
    separator = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    if separator is None:
        raise ValueError(
            f"form=pair needs a tokenizer with a sep_token or eos_token; {tokenizer.name_or_path!r} has none. "
            "Use form=choice."
        )
    return np.array([] if opening is None else [opening], dtype=np.int32), np.array(
        [separator], dtype=np.int32
    )


def _encode_once(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Token ids of each text; equal texts are tokenised once and share an array."""
    unique = list(dict.fromkeys(texts))
    ids = [np.array(encoding.ids, dtype=np.int32) for encoding in encode(tokenizer, unique)]
    by_text = dict(zip(unique, ids, strict=True))
    return [by_text[text] for text in texts]


def _equally_short(first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts the longer one, then both, to ``room`` tokens together.

    Example:
        >>> [len(part) for part in _equally_short(np.arange(9), np.arange(2), room=6)]
        [4, 2]
    """
    limit = max(room - min(len(first), len(second)), room // 2)
    return first[:limit], second[:limit]
