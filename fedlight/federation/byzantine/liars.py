"""Clients that lie, and what they say in the place of their updates.

Lies are simulated, to measure what an aggregation withstands; see Bagdasaryan et al., "How To Backdoor Federated Learning",
AISTATS 2020, https://arxiv.org/abs/1807.00459, for scaled updates, and Blanchard et al., NeurIPS 2017, section 5, for
gaussian and negated ones.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fedlight.federation.client import State
from fedlight.support.checks import Settings
from fedlight.support.seeding import derive_seed

Lie = Literal["flip", "scale", "noise"]


@dataclass(frozen=True)
class Liars(Settings):
    """Settings of who lies; in YAML ``liars: {share: 0.3}``. Equal settings draw the same clients, for updates and rows.

    Args:
        share: share of all clients that lie, drawn by seed, in [0, 1]; their number is rounded.
        clients: ids of those that lie, in the place of a drawn share; None: they are drawn.
        seed: seed of the draw, and of the lies.

    Raises:
        ValueError: ``share`` is out of its range; in `among`, a client is not there.

    Examples:
        >>> Liars(share=0.5).among(["d", "b", "a", "c"])
        ['a', 'b']
    """

    share: float = 0.2
    clients: list[str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1:
            raise ValueError(f"liars.share={self.share} of the clients must be in [0, 1]")

    def among(self, client_ids: Collection[str]) -> list[str]:
        """Return the liars among all clients, in the order of their ids."""
        everyone = sorted(client_ids)  # the draw does not depend on their order
        if self.clients is None:
            stream = np.random.default_rng(derive_seed(self.seed, "liars"))
            drawn = stream.permutation(len(everyone))[: round(self.share * len(everyone))]
            return [everyone[place] for place in sorted(drawn)]
        if unknown := sorted({*self.clients} - {*everyone}):
            raise ValueError(
                f"liars.clients has {unknown[0]!r}, which is no client of the data: take it out, or set liars.share"
            )
        return sorted({*self.clients})

    def named(self, client_ids: Collection[str], what: str) -> str:
        """Return a line for the log about who lies."""
        liars = self.among(client_ids)
        return f"{len(liars)} of {len(client_ids)} clients lie ({what}): {', '.join(liars) or 'none'}"


def lied(movement: State, lie: Lie, factor: float, seed: int) -> State:
    """Return what a liar sends in the place of its movement.

    Args:
        movement: its honest movement.
        lie: ``flip``: ``-factor`` times it, ``scale``: ``factor`` times it, ``noise``: gaussian noise of ``factor`` times
            its norm. Numbers that have not moved get no noise, such as those beyond a client's LoRA rank.
        factor: size of the lie.
        seed: seed of the noise.

    Examples:
        >>> lied({"w": torch.tensor([1.0, -2.0])}, "flip", 3.0, seed=0)["w"].tolist()
        [-3.0, 6.0]
    """
    if lie != "noise":
        return {name: value * (-factor if lie == "flip" else factor) for name, value in movement.items()}
    stream = torch.Generator().manual_seed(seed)
    noise = {
        name: torch.randn(movement[name].shape, generator=stream, dtype=torch.float64) * (movement[name] != 0)
        for name in sorted(movement)
    }
    size = _norm(noise)
    return {name: value * (factor * _norm(movement) / size if size else 0.0) for name, value in noise.items()}


def _norm(state: State) -> float:
    return float(sum(value.double().square().sum() for value in state.values())) ** 0.5
