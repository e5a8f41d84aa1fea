"""Texts that begin alike share a row, which holds their common tokens once, under a block mask.

The chosen and the rejected answer, all answers to a prompt, and the two orders of a comparison repeat their prompt. One row
holds the shared tokens once, then the rest of each text in turn. The positions of each rest continue those of the shared
tokens, and a token attends to the shared tokens and to its own text alone, so hidden states and gradients are those of
separate rows up to rounding.

F. Wang and S. Hegde, "Accelerating Direct Preference Optimization with Prefix Sharing", 2024,
https://arxiv.org/abs/2410.20305.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_SHARED = 32
"""Fewest tokens that a pair shares, in the mean over a batch, where a row is shared; other texts share twice as many."""
LARGEST_COST = 0.9
"""Largest cost of shared rows, in units of the cost of separate rows, where a row is shared."""


@dataclass(frozen=True)
class Packed:
    """Rows that several texts share.

    Args:
        input_ids: ``(shared, width)``, padded with 0.
        position_ids: place of each token in its text, ``(shared, width)``.
        allowed: True where a token attends to another, ``(shared, 1, width, width)``.
        rows: row of each text, ``(texts,)``.
        columns: column of each token of each text, ``(texts, tokens)``; that of the last token for padding.
    """

    input_ids: Tensor
    position_ids: Tensor
    allowed: Tensor
    rows: Tensor
    columns: Tensor

    def unpack(self, hidden: Tensor) -> Tensor:
        """Return ``(texts, tokens, features)`` from ``(shared, width, features)``."""
        return hidden[self.rows[:, None], self.columns]


@dataclass(frozen=True)
class Layout:
    """Place of each text in the shared rows.

    Args:
        rows: row of each text, ``(texts,)``, numbered from 0.
        shared: tokens that all texts of the row begin with, ``(texts,)``.
        offsets: tokens of the row's earlier texts after the shared ones, ``(texts,)``.
        lengths: tokens of each text, ``(texts,)``.
        count: number of rows.
        width: tokens of the longest row.
        mean_shared: mean of ``shared`` over texts that are not alone in their row, 0 without one.
    """

    rows: Tensor
    shared: Tensor
    offsets: Tensor
    lengths: Tensor
    count: int
    width: int
    mean_shared: float


def plan(input_ids: Tensor, attention_mask: Tensor, rows: Sequence[int]) -> Layout:
    """Return where the tokens of each text go; texts with the same number in ``rows`` share a row.

    Args:
        input_ids: ``(texts, tokens)``, padded on the right.
        attention_mask: ``(texts, tokens)``.
        rows: number of each text's row, each number from 0 to the largest at least once.

    Examples:
        >>> ids = torch.tensor([[5, 6, 7], [5, 6, 8]])
        >>> layout = plan(ids, torch.ones_like(ids), [0, 0])
        >>> layout.shared.tolist(), layout.offsets.tolist(), layout.width
        ([2, 2], [0, 1], 4)
    """
    owners = torch.tensor(rows, device=input_ids.device)
    together = owners[:, None] == owners  # [texts, texts]
    first = together.int().argmax(dim=1)  # first text of each row
    used = attention_mask.bool()
    equal = (input_ids == input_ids[first]) & used & used[first]
    lengths = used.sum(dim=1)
    # The last token is never shared, so that both forms can be compared in every text.
    common = equal.long().cumprod(dim=1).sum(dim=1).minimum(lengths - 1)
    shared = torch.where(together, common, input_ids.shape[1]).amin(dim=1)
    rest = torch.where(together, lengths - shared, 0)
    several = together.sum(dim=1) > 1
    mean_shared = (shared * several).sum() / several.sum().clamp(min=1)
    # One copy from the device for both numbers.
    width, mean = torch.stack([(shared + rest.sum(dim=1)).max().float(), mean_shared.float()]).tolist()
    return Layout(owners, shared, rest.tril(-1).sum(dim=1), lengths, max(rows) + 1, int(width), mean)


def pack(input_ids: Tensor, layout: Layout) -> Packed:
    """Return the shared rows of texts, ``(texts, tokens)``.

    Examples:
        >>> ids = torch.tensor([[5, 6, 7, 9], [5, 6, 8, 0]])
        >>> packed = pack(ids, plan(ids, torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]), [0, 0]))
        >>> packed.input_ids.tolist(), packed.position_ids.tolist()
        ([[5, 6, 7, 9, 8]], [[0, 1, 2, 3, 2]])
        >>> packed.allowed[0, 0].int().tolist()[-2:]  # 9 sees 5, 6, 7 and itself; 8 sees 5, 6 and itself
        [[1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    """
    texts, device = len(input_ids), input_ids.device
    places = torch.arange(input_ids.shape[1], device=device)
    positions = torch.minimum(places, layout.lengths[:, None] - 1)
    rest = positions >= layout.shared[:, None]
    columns = positions + rest * layout.offsets[:, None]
    at = layout.rows[:, None], columns
    # Part of a row: 0 for the shared tokens, else 1 + the number of the text; padding is a part for itself.
    parts = torch.full((layout.count, layout.width), texts + 1, device=device)
    parts[at] = rest * torch.arange(1, texts + 1, device=device)[:, None]
    ids, position_ids = (torch.zeros_like(parts) for _ in range(2))
    ids[at], position_ids[at] = input_ids.gather(1, positions), positions
    allowed = ((parts[:, None] == 0) | (parts[:, None] == parts[:, :, None])).tril()  # [rows, width, width]
    return Packed(ids, position_ids, allowed[:, None], layout.rows, columns)


def find_neighbours(input_ids: Tensor, attention_mask: Tensor) -> list[int]:
    """Return the number of each text's row, where a text that begins like half of the one before it shares its row.

    Examples:
        >>> ids = torch.tensor([[5, 6, 7], [5, 6, 8], [9, 6, 7]])
        >>> find_neighbours(ids, torch.ones_like(ids))
        [0, 0, 1]
    """
    used = attention_mask.bool()
    equal = (input_ids[1:] == input_ids[:-1]) & used[1:] & used[:-1]
    common = equal.long().cumprod(dim=1).sum(dim=1)
    begins = (2 * common < used[1:].sum(dim=1)).long()
    return [0, *begins.cumsum(dim=0).tolist()]


def pays(texts: int, tokens: int, layout: Layout, hidden_size: int) -> bool:
    """Return whether shared rows cost less than ``texts`` rows of ``tokens``, by a count of multiplications.

    A layer multiplies about ``12 * hidden_size**2`` times per token, and its attention ``2 * width * hidden_size`` times,
    because the kernels compute the masked products too. Rows of many long rests may therefore cost more than they save.

    Examples:
        >>> ids = torch.arange(184).repeat(2, 1)
        >>> ids[1, 140:] = 0
        >>> layout = plan(ids, torch.ones_like(ids), [0, 0])
        >>> layout.width, pays(2, 184, layout, hidden_size=576)
        (228, True)
    """
    separate, shared = (
        # (12 h^2 + 2 w h) / (2 h) for each token
        count * width * (6 * hidden_size + width)
        for count, width in ((texts, tokens), (layout.count, layout.width))
    )
    return shared <= LARGEST_COST * separate
