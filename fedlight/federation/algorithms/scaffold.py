"""SCAFFOLD: control variates take out of a client's steps what sets its data apart from all clients' data.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
https://arxiv.org/abs/1910.06378, Algorithm 1, option II. Of N clients, those sampled take K steps of rate lr:

    each step's gradient gains   c - c_m
    after the visit              c_m+ = c_m - c + (w_received - w) / (K * lr)
    after the round              c <- c + (1 / N) * sum over the sampled of (c_m+ - c_m)

Where the learning rate changes within a visit or differs between parameters, ``K * lr`` is the sum of the rates of a
parameter's steps: c_m+ is then the mean of its gradients, weighted by their rates.

All controls start at 0, so c stays the mean of all c_m. c goes down beside the parameters and c + (c_m+ - c_m) comes back,
through the channel, so the bytes count twice. The paper averages movements uniformly: ``weighting="uniform"``.

On a lossy wire c_m+ is the server's decoded value, which the client can decode as well, so c stays the mean. The next change
then makes up for the loss, as in EF21 (Richtarik et al., NeurIPS 2021, https://arxiv.org/abs/2106.05203). So controls may
take no part in a codec's error feedback, which would add the loss twice; nothing does that is no parameter
(`fedlight.federation.client.Channel.up`).
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedlight.federation.algorithm import Algorithm, Weighting
from fedlight.federation.client import Client, State, Update, Visit, Visiting, Work
from fedlight.federation.exact_sum import ExactSums
from fedlight.federation.protocols import Federation, refuse_odd_steps

PREFIX = "control."
OWN = "control"
logger = logging.getLogger("fedlight")


class Scaffold(Algorithm):
    """FedAvg with control variates, fp64 at the server and fp32 at the clients and on the wire.

    Exact under plain SGD (no momentum, no gradient clipping), also with several learning rates, schedules and optimizers.
    Under others, such as AdamW, ``(w_received - w) / (K * lr)`` is an estimate of the mean gradient in the optimizer's scale
    and not the gradient's: a model often learns nothing with it, and ``check`` warns of that. A visit without a step or with
    lr = 0 leaves its control as it was.

    Args:
        weighting: of the clients' parameters, as for `Algorithm`. Controls always count alike.

    Raises:
        ValueError: before the first round, for a robust aggregation, several adapters, LBFGS or an optimizer that maximizes.
    """

    def __init__(self, weighting: Weighting = "unbiased") -> None:
        super().__init__(weighting)
        self._control: State = {}
        self.sums = ExactSums()

    # The server: it keeps c, and sends it beside the parameters

    def check_settings(self, federation: Federation) -> None:
        if federation.robust:
            raise ValueError(
                "Scaffold needs the mean of the clients' controls, which a robust aggregation does not give: take out "
                "aggregation, or use another algorithm"
            )

    def check(self, federation: Federation) -> None:
        super().check(federation)
        refuse_odd_steps(federation.optimizers, "Scaffold")
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in federation.optimizers):
            raise ValueError(
                "Scaffold divides a movement by its learning rates, and LBFGS moves by many evaluations in a step: take "
                "torch.optim.SGD, or another algorithm"
            )
        own_rates = [o for o in federation.optimizers if any(g.get("lr") is None for g in o.param_groups)]
        if own_rates:
            raise ValueError(
                f"Scaffold divides a movement by its learning rates, and {type(own_rates[0]).__name__} has none: give it "
                "one, or take another algorithm"
            )
        taken = [name for name, _ in federation.module.named_parameters() if name.startswith(PREFIX)]
        if taken:
            raise ValueError(f"{taken[0]} is named as Scaffold names its controls: rename the submodule")
        other = [optimizer for optimizer in federation.optimizers if not _is_plain_sgd(optimizer)]
        if other and federation.train != "forward":  # whose steps are plain SGD, whatever the optimizer
            momentum = max(group.get("momentum", 0) for group in other[0].param_groups)
            logger.warning(
                "Scaffold is exact under plain SGD. Under %s%s its controls are estimates of another scale than the "
                "gradients', with which a model often learns nothing: take torch.optim.SGD without momentum "
                "(model.optimizer.name=SGD), at a higher learning rate than AdamW's.",
                type(other[0]).__name__,
                f" with momentum={momentum}" if momentum else "",
            )

    def start_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        self._num_clients = len(federation.clients)
        self.sums = ExactSums()

    def send(self, visit: Visit, client: Client, state: State) -> State:
        controls = {
            n: self._control[n].float() if n in self._control else torch.zeros_like(state[n]) for n in state
        }
        return state | {PREFIX + name: control for name, control in controls.items()}

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        parameters, changes = _split(movement)
        self.sums.add(changes)
        if changes:  # c_m+ stays with the client, which decodes its change as the server does
            control = dict(visiting.client.memory.get(OWN, {}))
            for name, change in changes.items():
                control[name] = (control[name] + change if name in control else change).float()
            visiting.client.memory[OWN] = control
        return super().finish_visit(visiting, parameters, work)

    def partial(self) -> dict[str, Any]:
        return {"changes": self.sums.partial()}

    def merge(self, partial: Mapping[str, Any]) -> None:
        self.sums.merge(partial["changes"])

    def finish_round(self, movement: State) -> State:
        for name, change in self.sums.result().items():
            before = self._control.get(name, torch.zeros_like(change))
            self._control[name] = before + change / self._num_clients  # N, not the number sampled
        return movement

    def state_dict(self) -> dict[str, Any]:
        return {"control": dict(self._control)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._refuse_without(state, "control", "controls")
        self._control = dict(state["control"])

    # The client: it steps by its gradients + c - c_m, and sends c + (c_m+ - c_m) back

    def start_visit(self, visit: Visit, client: Client, received: State) -> Visiting:
        control = client.memory.get(OWN, {})
        parameters, controls = _split(received)
        corrections = {n: c - control[n] if n in control else c for n, c in controls.items()}
        # A tensor without a correction, as all are in the first round, is left alone. Meta tensors have no values.
        corrections = {n: c for n, c in corrections.items() if c.is_meta or c.any()}
        return Visiting(visit, client, received, start=parameters, notes=corrections)

    @torch.no_grad()
    def adjust_gradients(
        self, visiting: Visiting, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        corrections = visiting.notes
        for name in [name for name in parameters if name in corrections]:
            # After the first step of a visit it is where the parameter is.
            corrections[name] = correction = corrections[name].to(parameters[name])
            if name in gradients:
                gradients[name].add_(correction)
            else:  # a gradient of 0 is corrected like any other
                gradients[name] = correction.clone()

    def reply(self, visiting: Visiting, trained: State, work: Work) -> State:
        parameters, controls = _split(visiting.received)
        # c_m+ - c_m = (w_received - w) / (K * lr) - c, as c_m cancels
        changes = {
            n: (parameters[n].double() - w) / work.lr_sums[n] - controls[n]
            for n, w in trained.items()
            if work.lr_sums[n] != 0  # without a step the control stays
        }
        return trained | {PREFIX + n: (controls[n] + d).float() for n, d in changes.items()}


def _split(state: State) -> tuple[State, State]:
    """Return the parameters, and the controls by the names of their parameters."""
    controls = {n.removeprefix(PREFIX): value for n, value in state.items() if n.startswith(PREFIX)}
    return {n: value for n, value in state.items() if not n.startswith(PREFIX)}, controls


def _is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer) is torch.optim.SGD and all(g["momentum"] == 0 for g in optimizer.param_groups)
