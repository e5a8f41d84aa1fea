"""Token ids of texts: tokenizers, prompts cut to a number of tokens, storage, padding.

A prompt that is too long is cut at the end of its trimmable slot (the post), never in an answer or at the place of the
choice; a text that still does not fit is dropped and counted by the caller. Cutting needs a *fast* tokenizer, which gives
the characters of each token.
"""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedlight.support.seeding import derive_seed
from fedlight.support.words import count_noun

if TYPE_CHECKING:
    import torch

CHUNK = 1000
IGNORED = -100
"""Label of a position without loss."""
SAMPLED = 300
"""Most rows that are drawn where some speak for all."""
SOME_UNKNOWN, MOST_UNKNOWN = 0.2, 0.5
"""Shares of unknown tokens above which a warning is given, and above which texts are refused."""
ANOTHER_MODEL = "set the model, and the tokenizer of the data, to one that was trained on such texts"


@dataclass(frozen=True)
class Parts:
    """Rendered text in three parts; the middle one may be cut at its end."""

    before: str
    trimmable: str
    after: str

    @property
    def text(self) -> str:
        """Whole text."""
        return self.before + self.trimmable + self.after

    def cut(self, characters: int) -> "Parts":
        """Return the parts with this many characters of the trimmable one, without trailing white space."""
        return Parts(self.before, self.trimmable[:characters].rstrip(), self.after)

    def stripped(self) -> "Parts":
        """Return the parts without white space around the whole."""
        before, middle, after = self.before.lstrip(), self.trimmable, self.after.rstrip()
        middle = middle if before else middle.lstrip()
        middle = middle if after else middle.rstrip()
        return Parts(
            before if middle or after else before.rstrip(),
            middle,
            after if before or middle else after.lstrip(),
        )


@dataclass(frozen=True)
class Fitted:
    """Encoded text that fits into a number of tokens."""

    ids: np.ndarray  # token ids without special tokens, ``(tokens,)``
    encoding: Any  # the tokenizer's ``Encoding``, with the characters of each token
    parts: Parts  # the text, cut where necessary
    kept: int  # remaining characters of the trimmable part

    def first_token_from(self, character: int) -> int:
        """Return the first token of a character of the text, or of the next character that is in a token."""
        places = (self.encoding.char_to_token(at) for at in range(character, len(self.parts.text)))
        return next((place for place in places if place is not None), len(self.ids))


class TokenTable:
    """Token sequences in one flat int32 array.

    Examples:
        >>> table = TokenTable([np.array([5, 6]), np.array([7])])
        >>> table[1].tolist(), table.lengths.tolist()
        ([7], [2, 1])
    """

    def __init__(self, sequences: Sequence[np.ndarray]) -> None:
        self.lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        # With an empty array: numpy concatenates no empty list.
        self._flat = np.concatenate([np.empty(0, np.int32), *sequences]).astype(np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        """Return the token ids of one sequence, ``(tokens,)``: a view."""
        return self._flat[self._starts[row] : self._starts[row + 1]]


def fit_texts(tokenizer: Any, texts: Sequence[Parts], max_tokens: int) -> Iterator[Fitted | None]:
    """Yield texts of at most ``max_tokens``, the trimmable part cut where necessary but never to nothing; None: cannot fit.

    Special tokens do not count.
    """
    for start in range(0, len(texts), CHUNK):
        chunk = list(texts[start : start + CHUNK])
        fitted: list[Fitted | None] = [None] * len(chunk)
        pending = list(range(len(chunk)))
        while pending:  # a cut text may be divided otherwise, and be too long again
            again = []
            for i, encoding in zip(pending, encode(tokenizer, [chunk[i].text for i in pending]), strict=True):
                excess = len(encoding) - max_tokens
                if excess <= 0:
                    ids = np.array(encoding.ids, dtype=np.int32)
                    fitted[i] = Fitted(ids, encoding, chunk[i], len(chunk[i].trimmable))
                elif (shorter := _cut(chunk[i], encoding.offsets, excess)) is not None:
                    chunk[i] = shorter
                    again.append(i)
            pending = again
        yield from fitted


def encode(tokenizer: Any, texts: Sequence[str]) -> list[Any]:
    """Return the ``tokenizers.Encoding`` of each text, without special tokens."""
    # verbose=False: transformers warns of texts that are longer than the model reads.
    return tokenizer(list(texts), add_special_tokens=False, verbose=False).encodings


def _cut(parts: Parts, offsets: Sequence[tuple[int, int]], excess: int) -> Parts | None:
    """Return the parts without the last ``excess`` tokens of the trimmable one; None if it would become empty."""
    start, end = len(parts.before), len(parts.before) + len(parts.trimmable)
    inside = [first for first, last in offsets if first >= start and last <= end]
    if len(inside) <= excess:
        return None
    shorter = parts.cut(inside[-excess] - start)
    # Blanks, or several tokens of one character, may leave the part empty or as long as before.
    return shorter if 0 < len(shorter.trimmable) < len(parts.trimmable) else None


def draw_rows(number: int) -> list[int]:
    """Return some of ``number`` rows, at random and always the same: every n-th may be of one kind."""
    return random.Random(derive_seed(0, "sample", number)).sample(range(number), min(number, SAMPLED))


def check_known(
    tokenizer: Any, name: str, texts: Sequence[str], source: str, remedy: str = ANOTHER_MODEL
) -> str:
    """Refuse texts that are mostly unknown to a tokenizer; return a warning where a good part is, else "".

    A tokenizer without an unknown token, or with one that ends texts too, as GPT-2's, knows every text. ``name`` and
    ``source`` name tokenizer and texts in messages; ``remedy`` says how to name another model.

    Raises:
        ValueError: more than half of the tokens are unknown.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        return ""
    ids = [token for encoding in encode(tokenizer, texts) for token in encoding.ids]
    share = ids.count(unknown) / max(len(ids), 1)
    finding = f"{source}: {share:.0%} of the text is unknown to the tokenizer {name!r}"
    if share > MOST_UNKNOWN:
        raise ValueError(f"{finding}, so a model would learn next to nothing: {remedy}")
    return f"{finding}, and a model cannot tell these words apart: {remedy}" if share > SOME_UNKNOWN else ""


def end_id(tokenizer: Any) -> int:
    """Return the token that ends a response; ValueError where the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} has no eos_token, so a response has no end. Set eos_token in its "
            "tokenizer_config.json."
        )
    return int(tokenizer.eos_token_id)


def end_ids(tokenizer: Any) -> frozenset[int]:
    """Return the special tokens; one of them ends an answer in a chat template."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    unknown = {tokenizer.unk_token_id} - {tokenizer.eos_token_id}  # GPT-2's is both
    return frozenset({*added, *tokenizer.all_special_ids} - unknown)


def warn_of_control(tokenizer: Any, texts: Iterable[str], source: str) -> None:
    """Warn of texts that hold special tokens of a tokenizer, which encodes them as such, not letter by letter."""
    names = [*filter(None, tokenizer.convert_ids_to_tokens(sorted(end_ids(tokenizer))))]
    pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
    hits = [hit.group() for hit in map(pattern.search, texts) if hit]
    if hits:
        from lightning.pytorch.utilities import rank_zero_warn  # here: reports do without

        rank_zero_warn(
            f"{source}: control tokens such as {hits[0]!r} in {count_noun(len(hits), 'text')}, which a model does not read "
            "as letters: they can end an answer or begin another turn. Take them out, unless they are meant"
        )


def pad_id(tokenizer: Any) -> int:
    """Return the padding token, or the end-of-sequence token where there is none; both are masked."""
    return int(tokenizer.pad_token_id) if tokenizer.pad_token_id is not None else end_id(tokenizer)


def pad(sequences: Sequence[np.ndarray], value: int) -> "torch.Tensor":
    """Pad sequences on the right to the longest: ``(batch, tokens)`` int64.

    Examples:
        >>> pad([np.array([1, 2]), np.array([3])], value=0).tolist()
        [[1, 2], [3, 0]]
    """
    import torch  # here: reports read the texts of rows, and need no tensors
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.tensor(ids, dtype=torch.int64) for ids in sequences]
    return pad_sequence(rows, batch_first=True, padding_value=value)


def pad_inputs(sequences: Sequence[np.ndarray], padding: int) -> "dict[str, torch.Tensor]":
    """Return ``input_ids`` and ``attention_mask``, both ``(batch, tokens)`` int64, padded on the right."""
    return {
        "input_ids": pad(sequences, padding),
        "attention_mask": pad([np.ones_like(ids) for ids in sequences], 0),
    }


def pad_responses(
    sequences: Sequence[np.ndarray], prompt_lengths: Sequence[int], padding: int
) -> "dict[str, torch.Tensor]":
    """Return a batch for a loss on the response only: ``labels`` are -100 on the prompt and on padding.

    Examples:
        >>> pad_responses([np.array([1, 2, 3])], prompt_lengths=[2], padding=0)["labels"].tolist()
        [[-100, -100, 3]]
    """
    labels = [
        np.concatenate([np.full(length, IGNORED), ids[length:]])
        for ids, length in zip(sequences, prompt_lengths, strict=True)
    ]
    return {**pad_inputs(sequences, padding), "labels": pad(labels, IGNORED)}


def padded_share(lengths: np.ndarray, batches: Sequence[Sequence[int]]) -> float:
    """Return the share of padding among all positions of the batches, in [0, 1).

    Examples:
        >>> padded_share(np.array([4, 2, 5, 5]), [[0, 1], [2, 3]])
        0.11111111111111116
    """
    used = sum(int(lengths[list(batch)].sum()) for batch in batches)
    return 1 - used / sum(len(batch) * int(lengths[list(batch)].max()) for batch in batches)
