"""Synthetic training examples that clients make for themselves: who makes candidates, when, and how many are kept."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from fedlight.federation.client import Client, read
from fedlight.federation.protocols import (
    Federation,
    GathersChoices,
    ScoresTogether,
    SynthesizesByOwnModels,
    SynthesizesData,
)

SYNTHETIC = "synthetic"
"""``split`` of a visit that trains on the chosen candidates of a client."""
MIXED = "mixed"
"""``split`` of a visit that trains on chosen candidates and the client's own examples, shuffled together."""
logger = logging.getLogger("fedlight")


class Candidates:
    """Candidates of the current round; ``left`` has the number of examples left for each client that made some."""

    _federation: Federation
    _data: SynthesizesData

    def __init__(self) -> None:
        self.left: dict[str, int] = {}

    def made_in(self, federation: Federation, algorithm: str) -> None:
        """Take the data of a run, before the first round; raise ValueError for data that cannot make candidates."""
        if not isinstance(federation.data, SynthesizesData):
            raise ValueError(
                f"{algorithm} has clients make training data for themselves, and {type(federation.data).__name__} cannot: "
                "take SyntheticInstructionDataModule, or a datamodule with the methods of SynthesizesData"
            )
        self._federation, self._data, self.left = federation, federation.data, {}

    def forget(self) -> None:
        """Drop all candidates, before a round."""
        self._data.reset_synthesis()
        self.left = {}

    def make_by_own_models(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        """Let each client make candidates and choose with its own model, on the base of its device."""
        self.forget()
        with as_received(federation):
            for clients in federation.by_base(cohort):
                # Before its first visit a client has the global model.
                states = {client.id: federation.own_state(client.id) or {} for client in clients}
                if together := isinstance(self._data, SynthesizesByOwnModels):
                    self._data.synthesize_by_own_models(
                        round_idx, states, federation.module, federation.holding
                    )
                for client in clients:
                    with federation.holding(states[client.id]):
                        if not together:
                            self._data.synthesize(round_idx, [client.id], federation.module)
                        self._take(round_idx, [client], federation.module, choose=True)

    def _take(self, round_idx: int, clients: Sequence[Client], module: nn.Module, choose: bool) -> None:
        """Count the candidates that clients keep, and log who keeps none; ``choose``: the module selects the best before."""
        names = [client.id for client in clients]
        if choose and isinstance(self._data, ScoresTogether):
            self._data.score_together(names, module)
        for name in names:
            if choose:
                self._data.choose(name, module)
            self.left[name] = self._data.num_synthetic(name)
        without = [client.id for client in clients if not self.left[client.id]]
        if without:
            logger.warning(
                "round %s: no example is left of those that %s made", round_idx + 1, ", ".join(without)
            )

    def make_by_global_model(
        self, round_idx: int, cohort: Sequence[Client], federation: Federation, choose: bool
    ) -> None:
        """Let each client make candidates with the global model as it receives it, on the base of its device."""
        self.forget()
        with as_received(federation):
            for clients in federation.by_base(cohort):
                self._data.synthesize(round_idx, [client.id for client in clients], federation.module)
                self._take(round_idx, clients, federation.module, choose)

    def choose(self, client: Client) -> None:
        """Have the module as it stands choose among the candidates of a client."""
        self._data.choose(client.id, self._federation.module)

    def partial(self) -> dict[str, Any]:
        """Return the clients' choices in this process; ValueError for data that do not record them."""
        if not isinstance(self._data, GathersChoices):
            raise ValueError(
                f"clients choose among their candidates in several processes, and {type(self._data).__name__} does not say "
                "what was chosen: give it choices_made() and add_choices(choices), or set trainer.devices=1"
            )
        return self._data.choices_made()

    def merge(self, partial: Mapping[str, Any]) -> None:
        """Add the clients' choices in one of the processes."""
        assert isinstance(self._data, GathersChoices)
        self._data.add_choices(partial)

    def log(self) -> None:
        """Log counts of the round, as ``fed/synthetic/NAME``; at its end, as choosing counts as well."""
        counts = {"clients": len(self.left), "clients_without": [*self.left.values()].count(0)}
        counted = {**self._data.synthesis_metrics(), **counts, "chosen": sum(self.left.values())}
        self._federation.log({f"synthetic/{name}": float(value) for name, value in counted.items()})


@contextmanager
def as_received(federation: Federation) -> Iterator[None]:
    """Put into the module the global state as clients receive it, which a lossy channel has changed."""
    trained = {name: p for name, p in federation.module.named_parameters() if p.requires_grad}
    with federation.holding(federation.broadcast(read(trained)).state):
        yield
