"""Part of a federated run: one concern, in one file, which the loop does not know by name.

`FederatedLoop` goes through its parts at each place of a round. A part that a run does not need is not made, so its file is
neither imported nor entered. `fedlight.callbacks.loop.parts.order` has their order. A part of your own comes after them:
``FederatedLoop(parts=[...])``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from fedlight.federation.algorithm import Aggregation
from fedlight.federation.client import State, Update, Visit
from fedlight.support.checks import Checked


class Part(Checked):
    """One concern of a federated run. Each method does nothing by default.

    The modules of the arguments' types import this one: ``run`` is the same `Run` in all methods, ``group`` an `OpenGroup`,
    ``round`` an `OpenRound` and ``visit`` an `OpenVisit`; `weighed` has a `Visit`.

    A part keeps values of a visit or a round in its attributes until that ends. Each of several processes has its own parts,
    and each part gets the results of its counterparts (`partial`, `merge`).
    """

    def check(self, run: Any) -> None:
        """Raise ValueError, in ``setup`` and before any work, for a run that does not suit the part."""

    def meet(self, run: Any) -> None:
        """Take the clients, ``run.clients``; raise ValueError if they do not suit the part."""

    def attach(self, run: Any) -> None:
        """Take the federated parameters, ``run.parameters``, before the first round is planned."""

    def agree(self, run: Any) -> None:
        """Compare this process with the others where each decides alone: after a validation and before a plan."""

    def start_round(self, run: Any) -> None:
        """Begin a round before its first batch; parameters and optimizers are those of its visits."""

    def aggregation(self, run: Any, inner: Aggregation, num_clients: int) -> Aggregation:
        """Return the aggregation of a round that begins: ``inner``, or one around it."""
        return inner

    def enter(self, run: Any, group: Any, batch: Any) -> None:
        """Begin a group of visits with their first batch; the module holds their start parameters."""

    def before_step(self, run: Any, group: Any, optimizer: Optimizer) -> None:
        """Look at the gradients before an optimizer step, which the algorithm has changed; clipping comes later."""

    def after_batch(self, run: Any, group: Any) -> None:
        """Look at the module after each batch of a visit."""

    def leave(self, run: Any, group: Any, visit: Any) -> None:
        """End a visit before its update is made; the module holds the client's trained parameters."""

    def weighed(self, group: Any, visit: Visit, update: Update) -> Update:
        """Return a visit's update as it is aggregated."""
        return update

    def visited(self, run: Any) -> None:
        """Note a finished visit; its update is aggregated, and its row is the last of ``run.records``."""

    def end_visits(self, run: Any, round: Any) -> None:
        """Note the end of this process's visits of the round, before the server's step."""

    def finish_round(self, run: Any, round: Any, movement: State) -> dict[str, float]:
        """Take the combined movement of a round before the server's step, and return metrics of the round."""
        return {}

    def after_step(self, run: Any, state: State) -> None:
        """Look at the server's new state before the module gets it."""

    def after_round(self, run: Any, metrics: Mapping[str, float]) -> None:
        """Take all metrics of a round that is over and logged."""

    def saved(self, run: Any, state: dict[str, Any]) -> None:
        """Change the loop's state as a checkpoint is written; all processes call it, and the first one writes."""

    def abort(self, run: Any) -> None:
        """Undo `enter` where the trainer stops inside a group."""

    def partial(self) -> Any:
        """Return the results of this process's visits of a round, as tensors and plain values, and start anew."""

    def merge(self, partials: Sequence[Any]) -> None:
        """Take the `partial` of all processes, in the order of their ranks, this one's among them."""
