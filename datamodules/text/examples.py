"""Map-style data sets of token ids or vectors, and the collation of their examples into batches.

The examples of one set share a `TokenTable`: a set holds only row numbers and labels, so a client costs no more memory than
its indices, and a comparison with a hundred votes is stored once.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NotRequired, Self, TypedDict

import numpy as np
import torch
from torch.utils.data import Dataset

from fedlight.datamodules.text.encoding import Comparison, Encoded
from fedlight.datamodules.text.tokens import IGNORED, TokenTable, pad, pad_inputs, pad_responses


class Examples(Dataset):
    """Base class of sets of examples; each array of a set has an entry for each example."""

    lengths: np.ndarray  # tokens of each example, ``(examples,)``
    labelled: np.ndarray  # number of these tokens that are scored one by one, ``(examples,)``

    def take(self, indices: np.ndarray) -> Self:
        """Return a set of some of the examples, in this order."""
        taken = copy.copy(self)
        arrays = ((name, value) for name, value in vars(self).items() if isinstance(value, np.ndarray))
        vars(taken).update({name: array[indices] for name, array in arrays})
        return taken

    def by_length(self) -> Self:
        """Return the set with its examples sorted by length, so that neighbours share a batch with little padding."""
        return self.take(np.argsort(self.lengths, kind="stable"))

    def __len__(self) -> int:
        return len(self.lengths)


class Choice(TypedDict):
    """Comparison in one order; ``label`` is 0 where A, the answer shown first, is better.

    ``order`` is 2c or 2c + 1 for the two orders of comparison c of the set, where it is to be joined.
    """

    ids: np.ndarray
    second_segment: int
    label: int
    order: NotRequired[int]


class ChoiceExamples(Examples):
    """Comparisons for a selector, two examples per vote: 2v is vote v in the comparison's order, 2v + 1 swapped.

    ``rows`` are the sequences of the examples, ``labels`` their choices (0, 1), both ``(examples,)``.
    """

    def __init__(self, encoded: Encoded, rows: np.ndarray, labels: np.ndarray) -> None:
        self.encoded, self.rows, self.labels = encoded, rows, labels
        self.lengths = encoded.table.lengths[rows]
        self.labelled = np.zeros_like(self.lengths)  # the choice is no token of the text

    @classmethod
    def from_votes(cls, encoded: Encoded, comparison: np.ndarray, winner: np.ndarray) -> "ChoiceExamples":
        """Return the examples of both orders of every vote; arguments as `PreferredExamples`."""
        rows = (2 * comparison[:, None] + [0, 1]).reshape(-1)  # 2c and 2c + 1 for each vote
        labels = np.stack([winner, 1 - winner], axis=1).reshape(-1)  # swapped, the other one is A
        return cls(encoded, rows, labels)

    def __getitem__(self, item: int) -> Choice:
        row = self.rows[item]
        return {
            "ids": self.encoded.table[row],
            "second_segment": int(self.encoded.marks[row]),
            "label": int(self.labels[item]),
            "order": int(row),
        }


class Response(TypedDict):
    """Prompt with a response; the first ``prompt_length`` tokens are the prompt.

    ``taught`` is 1 for each token with loss, else 0, where not all tokens of the response have it.
    """

    ids: np.ndarray
    prompt_length: int
    taught: NotRequired[np.ndarray]


class ResponseExamples(Examples):
    """Prompts with responses, for a loss on the response only; ``rows`` is the sequence of each example, ``(examples,)``."""

    def __init__(self, encoded: Encoded, rows: np.ndarray) -> None:
        self.encoded, self.rows = encoded, rows
        self.lengths = encoded.table.lengths[rows]
        self.labelled = encoded.count_taught()[rows]

    def __getitem__(self, item: int) -> Response:
        return _get_response(self.encoded, self.rows[item])


def join_examples(first: ResponseExamples, second: ResponseExamples) -> ResponseExamples:
    """Return one set of the examples of ``first`` followed by those of ``second``."""
    parts = (first, second)
    table = TokenTable([part.encoded.table[row] for part in parts for row in part.rows])
    marks = np.concatenate([part.encoded.marks[part.rows] for part in parts])
    kept = np.ones(len(marks), dtype=bool)  # examples of a set fit
    masks = [part.encoded.taught[row] for part in parts if part.encoded.taught for row in part.rows]
    taught = TokenTable(masks) if masks else None
    return ResponseExamples(Encoded(table, marks, kept, 0, taught), np.arange(len(marks)))


def _get_response(encoded: Encoded, row: int) -> Response:
    response: Response = {"ids": encoded.table[row], "prompt_length": int(encoded.marks[row])}
    return response if encoded.taught is None else {**response, "taught": encoded.taught[row]}


class Preferred(TypedDict):
    """Chosen and rejected response to one prompt; ``index`` is the number of the pair in the whole data."""

    chosen: Response
    rejected: Response
    index: int


class PreferredExamples(Examples):
    """Chosen and rejected responses, of two encoded sequences per comparison, one example per vote.

    ``comparison``, ``winner`` (0: the first answer) and ``index``, a number unique in the datamodule, are ``(votes,)``.
    """

    def __init__(
        self, encoded: Encoded, comparison: np.ndarray, winner: np.ndarray, index: np.ndarray
    ) -> None:
        self.encoded, self.comparison, self.winner, self.index = encoded, comparison, winner, index
        both = 2 * comparison[:, None] + [0, 1]  # [votes, 2]
        self.lengths = encoded.table.lengths[both].max(axis=1)  # the sides are padded to the longer one
        self.labelled = encoded.count_taught()[both].sum(axis=1)  # of both sides

    def __getitem__(self, item: int) -> Preferred:
        row, winner = 2 * int(self.comparison[item]), int(self.winner[item])
        return {
            "chosen": _get_response(self.encoded, row + winner),
            "rejected": _get_response(self.encoded, row + 1 - winner),
            "index": int(self.index[item]),
        }


class FeaturePair(TypedDict):
    """Comparison in one order; ``label`` is 0 where the first answer is better.

    ``rows`` are the places of both answers in ``vectors``, ``(answers, dimension)``, which all examples of a set share: a
    batch takes its vectors in one step, which is ten times faster than one by one.
    """

    vectors: torch.Tensor
    rows: np.ndarray
    label: int


class FeatureExamples(Examples):
    """Comparisons of texts as pairs of frozen vectors, one example per vote: a selector on features sees no order.

    ``vectors`` are those of the distinct answers, ``(answers, dimension)``, ``pairs`` the rows of both answers of each
    example, ``(examples, 2)``, and ``labels`` 0 or 1, ``(examples,)``.
    """

    def __init__(self, vectors: torch.Tensor, pairs: np.ndarray, labels: np.ndarray) -> None:
        self.vectors, self.pairs, self.labels = vectors, pairs, labels
        self.lengths = np.ones(len(pairs), dtype=np.int64)  # features have no tokens
        self.labelled = np.zeros_like(self.lengths)

    @classmethod
    def from_votes(
        cls,
        encode: Callable[[list[str]], np.ndarray],
        comparisons: Sequence[Comparison],
        comparison: np.ndarray,
        winner: np.ndarray,
    ) -> "FeatureExamples":
        """Return the examples of all votes, given the index of each vote's comparison and of its winner, ``(votes,)``.

        ``encode`` gets each distinct answer once.
        """
        rows: dict[str, int] = {}
        pairs = [
            [rows.setdefault(text, len(rows)) for text in (each.first, each.second)] for each in comparisons
        ]
        return cls(torch.from_numpy(encode([*rows])), np.array(pairs)[comparison], winner)

    def __getitem__(self, item: int) -> FeaturePair:
        return {"vectors": self.vectors, "rows": self.pairs[item], "label": int(self.labels[item])}


def collate_choices(examples: list[Choice], padding: int, with_types: bool) -> dict[str, torch.Tensor]:
    """Return a batch for a selector: ``input_ids`` and ``attention_mask`` ``(batch, tokens)``, ``labels`` ``(batch,)``.

    Also ``orders`` ``(batch,)``, if all examples have an order. ``with_types`` adds ``token_type_ids`` ``(batch, tokens)``,
    1 on segment B.
    """
    ids = [example["ids"] for example in examples]
    batch = pad_inputs(ids, padding)
    if with_types:
        borders = [example["second_segment"] for example in examples]
        types = [
            (np.arange(len(row)) >= border).astype(int) for row, border in zip(ids, borders, strict=True)
        ]
        batch["token_type_ids"] = pad(types, 0)
    if all("order" in example for example in examples):
        batch["orders"] = torch.tensor([example["order"] for example in examples])
    return {**batch, "labels": torch.tensor([example["label"] for example in examples])}


def collate_responses(examples: list[Response], padding: int) -> dict[str, torch.Tensor]:
    """Return a batch for SFT: ``input_ids``, ``attention_mask`` and ``labels``, all ``(batch, tokens)``."""
    lengths = [example["prompt_length"] for example in examples]
    batch = pad_responses([example["ids"] for example in examples], lengths, padding)
    if all("taught" in example for example in examples):
        batch["labels"][pad([example["taught"] for example in examples], 0) == 0] = IGNORED
    return batch


def collate_preferred(examples: list[Preferred], padding: int) -> dict[str, Any]:
    """Return a batch for DPO: two batches for SFT, ``chosen`` and ``rejected``, and ``index`` ``(batch,)``."""
    return {
        "chosen": collate_responses([example["chosen"] for example in examples], padding),
        "rejected": collate_responses([example["rejected"] for example in examples], padding),
        "index": torch.tensor([example["index"] for example in examples]),
    }


def collate_features(examples: list[FeaturePair]) -> dict[str, torch.Tensor]:
    """Return a batch of examples of one set: ``features`` ``(batch, 2, dimension)``, ``labels`` ``(batch,)``."""
    rows = torch.from_numpy(np.stack([example["rows"] for example in examples]))  # [batch, 2]
    labels = torch.tensor([example["label"] for example in examples])
    return {"features": examples[0]["vectors"][rows], "labels": labels}  # all share them
