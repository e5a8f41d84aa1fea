"""Clients that lie about their updates: the part `Malicious` of a federated run, around any algorithm.

A liar trains as all do. Before its reply is made, the parameters that it has trained are replaced by

    received + lie(trained - received)

so the lie passes through the algorithm's reply, the wire and `federated.limits`, as that of a device would. A line of the
log names the liars. Liars that train as all do, on poisoned rows: `fedlight.datamodules.rows.poison`.
"""

import math

from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.visit import OpenGroup, OpenVisit, RebuildsUploads
from fedlight.federation.byzantine.liars import Liars, Lie, lied
from fedlight.federation.byzantine.whole_updates import FLTrust
from fedlight.federation.client import moved, movement, write
from fedlight.federation.lora.pairs import pad_to
from fedlight.support.seeding import derive_seed


class Malicious(Part):
    """Part that makes clients lie, under any algorithm: ``FederatedLoop(parts=[Malicious("flip")])``.

    Parameters that a client has not received, such as its own head, are left alone. The control variates of `Scaffold`
    follow from the lie. An update that is not finite is left out, whoever sends it.

    Args:
        lie: ``flip`` sends the negated update times ``factor``, ``scale`` the update times ``factor``, ``noise`` gaussian
            noise with ``factor`` times the norm of the update.
        factor: size of the lie, above 0; not 1 for ``scale``, which would be no lie.
        liars: who lies.

    Raises:
        ValueError: a setting is out of range; before the first round, a liar is no client, or the clients send scalars, as
            those of FedKSeed.
    """

    def __init__(self, lie: Lie = "flip", factor: float = 1.0, liars: Liars = Liars()) -> None:
        if not 0 < factor < math.inf:
            raise ValueError(f"factor={factor} is the size of a lie and must be above 0")
        if lie == "scale" and factor == 1:
            raise ValueError("lie=scale with factor=1 sends the honest update: set factor, such as 10")
        self.lie, self.factor, self.liars = lie, factor, liars
        self._liars: list[str] = []

    def check(self, run: Run) -> None:
        if isinstance(run.algorithm, RebuildsUploads):
            raise ValueError(
                f"Malicious lies about parameters, and clients of {type(run.algorithm).__name__} send scalars: take another "
                "algorithm, such as FedAvg"
            )

    def meet(self, run: Run) -> None:
        self._liars = self.liars.among(run.clients)
        if isinstance(run.aggregation, FLTrust) and run.aggregation.root in self._liars:
            raise ValueError(
                f"aggregation.root={run.aggregation.root!r} is among the liars, and FLTrust follows it: set liars.clients "
                "or liars.seed"
            )
        rank_zero_info(self.liars.named(run.clients, f"{self.lie}, {self.factor:g} times"))

    def leave(self, run: Run, group: OpenGroup, visit: OpenVisit) -> None:
        """Put a lie in the place of the parameters that a liar has trained."""
        visiting = visit.visiting
        if visiting.client.id not in self._liars:
            return
        trained = {name: value for name, value in visit.read().items() if name in visiting.received}
        # ProductAverage sends factors without their rows and columns of 0.
        received = {name: pad_to(visiting.received[name], value.shape) for name, value in trained.items()}
        seed = derive_seed(self.liars.seed, "lie", run.round_idx, *visiting.visit.purpose)
        lies = moved(received, lied(movement(received, trained), self.lie, self.factor, seed))
        write(lies, visit.parameters)
        if visit.trained is not None:  # beside other clients
            visit.trained |= lies
