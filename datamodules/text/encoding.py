"""Encodings of comparisons and responses as token ids, in the three forms that the modules read.

* **choice**: the whole comparison as one text for a causal language model, up to the place of the choice. It is encoded with
  ``" A"`` and the last token is dropped, so that the next token is the choice token whatever the tokenizer does with blanks.
* **pair**: ``[CLS] prompt [SEP] A [SEP] B [SEP]`` for an encoder with a 2-class head; prompt and A are segment 0, B is
  segment 1.
* **responses**: prompt, response and the end-of-sequence token, with the length of the prompt, for losses on the response
  only. In a chat template they are the tokens of ``apply_chat_template(tokenize=True)``, and a mask says which are taught.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedlight.datamodules.text.templates import Template
from fedlight.datamodules.text.tokens import Parts, TokenTable, encode, end_id, fit_texts
from fedlight.pretrained.openings import opening_ids

TaughtTurns = Literal["all", "last"]
EMPTY = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class Comparison:
    """Two different answers to one prompt; their order has no meaning."""

    fields: Mapping[str, str]
    first: str
    second: str


@dataclass
class Encoded:
    """Encoded token sequences; a sequence that does not fit into the token limit is empty."""

    table: TokenTable  # token sequences
    # first token of segment 1 (pair) or of the response (responses) in each sequence, ``(sequences,)``; for choice 0
    marks: np.ndarray
    kept: np.ndarray  # whether each sequence fits, ``(sequences,)``
    trimmed: int  # number of sequences that lost text
    # 1 for each token of a sequence with loss, else 0; None: all from the mark on
    taught: TokenTable | None = None

    def both_kept(self) -> np.ndarray:
        """Return whether both sequences of each comparison fit, ``(comparisons,)``."""
        return np.asarray(self.kept.reshape(-1, 2).all(axis=1))  # sequences 2c and 2c + 1

    def count_taught(self) -> np.ndarray:
        """Return the number of tokens with loss of each sequence of responses, ``(sequences,)``."""
        if self.taught is None:
            return self.table.lengths - self.marks
        return np.array([int(self.taught[row].sum()) for row in range(len(self.taught))])


def choice_ids(tokenizer: Any, template: Template, choices: tuple[str, str] = ("A", "B")) -> tuple[int, int]:
    """Return the tokens of the two choices at the template's end; ValueError unless they are one distinct token each."""
    tail = template.text.rpartition("}")[2]  # after the last slot: the choice follows it
    with_a, with_b = (encoding.ids for encoding in encode(tokenizer, [f"{tail} {word}" for word in choices]))
    if len(with_a) != len(with_b) or with_a[:-1] != with_b[:-1] or with_a[-1] == with_b[-1]:
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} encodes {tail.strip()!r} + ' {choices[0]}' and ' {choices[1]}' as "
            f"{with_a} and {with_b}: they must differ in the last token only. Set "
            f"choices={list(choices)} to other words, such as [a, b], or change the template's end, or the tokenizer."
        )
    return with_a[-1], with_b[-1]


def encode_choice(
    tokenizer: Any,
    template: Template,
    comparisons: Sequence[Comparison],
    max_tokens: int,
    choices: tuple[str, str] = ("A", "B"),
) -> Encoded:
    """Encode comparisons for a causal model: sequences 2c and 2c + 1 are comparison c in its own and in the swapped order.

    The tokenizer is a fast one; the template has slots for both answers, and ``choices`` are the words of the two choices.

    Raises:
        ValueError: a choice is not one token, or not the last.
    """
    letter = choice_ids(tokenizer, template, choices)[0]
    leading = leading_ids(tokenizer, template)
    texts = [
        template.render({**comparison.fields, "response_a": a, "response_b": b}, ending=f" {choices[0]}")
        for comparison in comparisons
        for a, b in ((comparison.first, comparison.second), (comparison.second, comparison.first))
    ]
    sequences, trimmed = [], 0
    # One token more than the limit: the letter is encoded to see that it stays a token alone, and left out again.
    for text, fitted in zip(texts, fit_texts(tokenizer, texts, max_tokens - len(leading) + 1), strict=True):
        if fitted is not None and fitted.ids[-1] != letter:
            raise ValueError(
                f"the choice is not the last token of {text.text[-40:]!r}: the tokenizer merges it with the text before it."
            )
        trimmed += fitted is not None and fitted.parts is not text
        sequences.append(EMPTY if fitted is None else np.concatenate([leading, fitted.ids[:-1]]))
    return _make_encoded(sequences, [0] * len(sequences), trimmed)


def leading_ids(tokenizer: Any, template: Template) -> np.ndarray:
    """Return the tokens before each text of a template: none where it is a chat, which holds its own."""
    return np.array([] if template.is_chat else opening_ids(tokenizer), dtype=np.int32)


def encode_responses(
    tokenizer: Any,
    template: Template,
    fields: Sequence[Mapping[str, str]],
    responses: Sequence[str],
    max_tokens: int,
    pairs: bool = False,
    taught_turns: TaughtTurns = "last",
) -> Encoded:
    """Encode prompt, blank, response and end token; ``marks`` are the lengths of the prompts in tokens.

    The response is never cut. The tokenizer is a fast one; the template ends where the response begins, and ``max_tokens``
    includes the end token. With ``pairs``, sequences 2c and 2c + 1 answer the same prompt, and a long one is cut equally.
    Of a conversation, all answers are taught, or the last one.

    Raises:
        ValueError: a conversation does not fit into the chat template, or an answer has no end token.
    """
    leading = leading_ids(tokenizer, template)
    end = np.array([] if template.is_chat else [end_id(tokenizer)], dtype=np.int32)  # a chat has it
    endings = [template.continuation(response) + template.closing for response in responses]
    texts = [template.render(slots, ending) for slots, ending in zip(fields, endings, strict=True)]
    budget = max_tokens - len(leading) - len(end)
    shared = _cut_pairs(tokenizer, texts, budget) if pairs else texts
    sequences, marks, masks, trimmed = [], [], [], 0
    for row, fitted in enumerate(fit_texts(tokenizer, shared, budget)):
        if fitted is None:
            sequences.append(EMPTY)
            marks.append(0)
            masks.append(EMPTY)
            continue
        # A token across the border belongs to the response: the encoded prompt alone would not have it.
        prompt_end = len(fitted.parts.text) - len(endings[row])
        marks.append(len(leading) + fitted.first_token_from(prompt_end))
        sequences.append(np.concatenate([leading, fitted.ids, end]))
        trimmed += fitted.parts != texts[row]
        if template.chat is not None:
            turns = template.turns(fields[row])
            template.chat.check(texts[row].text, turns, responses[row])
            earlier = template.chat.earlier_answers(turns, responses[row]) if taught_turns == "all" else []
            last = len(fitted.parts.text) - len(template.chat.closing) + template.chat.stop
            spans = [*earlier, (prompt_end + template.chat.lead, last)]
            masks.append(template.chat.taught(fitted.encoding, spans))
            marks[-1] = int(masks[-1].argmax())  # the first taught token
    encoded = _make_encoded(sequences, marks, trimmed)
    return encoded if template.chat is None else replace(encoded, taught=TokenTable(masks))


def encode_pair(
    tokenizer: Any,
    template: Template,
    comparisons: Sequence[Comparison],
    max_tokens: int,
    truncate_answers: bool = False,
) -> Encoded:
    """Encode comparisons for an encoder: sequences 2c and 2c + 1 are comparison c in its own and in the swapped order.

    The prompt is cut first, if necessary to zero tokens. If that is not enough, the comparison does not fit, unless
    ``truncate_answers`` is set: then the longer answer loses its end until both are equally long, then both do.
    The tokenizer is a fast one with a separator (or end) token; an empty template leaves the prompt out.
    """
    opening, separator = _find_separators(tokenizer)
    prompts = _encode_once(tokenizer, [template.render(comparison.fields).text for comparison in comparisons])
    firsts = _encode_once(tokenizer, [comparison.first for comparison in comparisons])
    seconds = _encode_once(tokenizer, [comparison.second for comparison in comparisons])
    sequences, marks, trimmed = [], [], 0
    for prompt, first, second in zip(prompts, firsts, seconds, strict=True):
        room, full = max_tokens - len(opening) - 2 * len(separator), len(prompt) + len(first) + len(second)
        if truncate_answers:
            first, second = _shorten_equally(first, second, room)
        room -= len(first) + len(second)  # for the prompt; below 0 not even the answers fit
        left = prompt[: max(room - len(separator), 0)]  # a prompt needs a separator, too
        trimmed += 2 * (room >= 0 and len(left) + len(first) + len(second) < full)  # both orders
        head = [opening, left, separator] if len(left) else [opening]
        for a, b in ((first, second), (second, first)):
            segments = [np.concatenate([*head, a, separator]), np.concatenate([b, separator])]
            sequences.append(np.concatenate(segments) if room >= 0 else EMPTY)
            marks.append(len(segments[0]) if room >= 0 else 0)
    return _make_encoded(sequences, marks, trimmed)


def _make_encoded(sequences: list[np.ndarray], marks: list[int], trimmed: int) -> Encoded:
    table = TokenTable(sequences)
    return Encoded(table, np.array(marks, dtype=np.int64), table.lengths > 0, trimmed)


def _cut_pairs(tokenizer: Any, texts: list[Parts], budget: int) -> list[Parts]:
    """Return texts with both prompts of a pair cut to the shorter length that fits."""
    kept = [None if fitted is None else fitted.kept for fitted in fit_texts(tokenizer, texts, budget)]
    shared = list(texts)
    for start in range(0, len(texts), 2):
        a, b = kept[start], kept[start + 1]
        if a is not None and b is not None and a != b:
            shared[start : start + 2] = [text.cut(min(a, b)) for text in texts[start : start + 2]]
    return shared


def _find_separators(tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    opening = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
    separator = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
    if separator is None:
        raise ValueError(
            f"form=pair needs a tokenizer with a sep_token or eos_token; {tokenizer.name_or_path!r} has none. Use "
            "form=choice."
        )
    openings = [] if opening is None else [opening]  # some tokenizers have none
    return np.array(openings, dtype=np.int32), np.array([separator], dtype=np.int32)


def _encode_once(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the token ids of each text; equal texts are tokenized once and share an array."""
    unique = list(dict.fromkeys(texts))
    ids = [np.array(encoding.ids, dtype=np.int32) for encoding in encode(tokenizer, unique)]
    by_text = dict(zip(unique, ids, strict=True))
    return [by_text[text] for text in texts]


def _shorten_equally(first: np.ndarray, second: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut the longer answer, then both, until they have ``room`` tokens together.

    Examples:
        >>> [len(part) for part in _shorten_equally(np.arange(9), np.arange(2), room=6)]
        [4, 2]
    """
    # An answer of at most half of the room stays whole.
    limit = max(room - min(len(first), len(second)), room // 2)
    return first[:limit], second[:limit]
