"""Rows of a batch that holds the examples of several clients, one client after the other."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedlight.stacking.dropout import Texts


class Rows:
    """Clients of the rows in a layer's input.

    A layer sees the batch's rows in order, ``m`` times over (DPO joins all chosen responses and then all rejected ones), so
    an input has ``m * sum(counts)`` rows. With equal counts each client's rows are a view of it. With unequal counts they
    are copied into blocks as long as the largest.

    Args:
        counts: examples of each client, each at least 1.

    Raises:
        ValueError: there is no client, or a client has no example.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        if not counts or min(counts) < 1:
            raise ValueError(f"counts={list(counts)}: every client of a batch needs at least one example")
        self.counts = list(counts)
        self.clients, self.total, self.longest = len(counts), sum(counts), max(counts)
        self.equal = self.longest * self.clients == self.total
        self.texts = Texts()
        self._places: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def tiles(self, x: Tensor, layer: str) -> int:
        """Return how many times over an input holds the batch's rows.

        Raises:
            ValueError: its rows are not those of the batch.
        """
        tiles, rest = divmod(x.shape[0], self.total)
        # More than pairs of feature vectors: tokens, whose texts no earlier input has shown.
        is_flat = x.dim() == 2 and tiles > max(2, self.texts.known[0] // self.total)
        if rest or not tiles or is_flat:
            raise ValueError(
                f"{layer} got an input of shape {tuple(x.shape)}, whose rows are not the {self.total} examples of "
                f"{self.clients} clients: its adapters cannot be stacked. Leave this layer out of the adapter, or set "
                "clients_at_once to 1"
            )
        return tiles

    def split(self, x: Tensor, tiles: int) -> Tensor:
        """Return an input by client, ``(m * clients, positions, features)``, with ``m`` of `tiles`.

        Args:
            x: ``(m * total, ..., features)``.
            tiles: m.
        """
        if not self.equal:
            x = x.index_select(0, self._indices(tiles, x.device)[0])
        return x.reshape(tiles * self.clients, -1, x.shape[-1])

    def join(self, y: Tensor, shape: torch.Size, tiles: int) -> Tensor:
        """Undo `split`.

        Args:
            y: ``(m * clients, positions, features)``.
            shape: shape of the result, ``(m * total, ..., features)``.
            tiles: m.
        """
        if self.equal:
            return y.view(shape)
        return y.view(-1, *shape[1:]).index_select(0, self._indices(tiles, y.device)[1])

    def _indices(self, tiles: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the row behind each place of the blocks, and the place of each row."""
        if (tiles, device) not in self._places:
            ends = torch.tensor(self.counts).cumsum(0)
            at = torch.arange(self.longest)
            inside = at < torch.tensor(self.counts)[:, None]  # [clients, longest]
            starts = (ends - torch.tensor(self.counts))[:, None]
            rows = torch.where(inside, starts + at, starts)  # other places repeat the client's first row
            first = torch.arange(tiles)[:, None]
            places = inside.flatten().nonzero()[:, 0]
            self._places[tiles, device] = (
                (rows.flatten() + first * self.total).flatten().to(device),
                (places + first * len(rows.flatten())).flatten().to(device),
            )
        return self._places[tiles, device]
