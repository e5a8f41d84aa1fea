"""Visits in the federated loop: download, local work, upload.

Visits of one group are trained side by side: they share their optimizer steps, and each has its own losses.
"""

import logging
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, promote_types
from torch.optim import Optimizer

from fedlight.callbacks.loop.run import seed_all
from fedlight.federation.algorithm import Algorithm, ServerOptimizer, message_to
from fedlight.federation.algorithms.lora.unlike_ranks import UnlikeRanks
from fedlight.federation.client import (
    Channel,
    Client,
    Diverged,
    Payload,
    State,
    Update,
    Upload,
    Visit,
    Visiting,
    Work,
    is_finite,
    moved,
    read,
    refuse_not_finite,
)
from fedlight.federation.lora.pairs import pad_to
from fedlight.federation.lora.products import with_factors
from fedlight.federation.lora.ranks import cut_to_rank, pad_like, rank_of, refuse_moved_zeros
from fedlight.federation.protocols import HoldsAdapters
from fedlight.support.torch_parts import replaced

SET_BY_HAND = ("lr", "momentum", "betas", "weight_decay")
"""Settings of an optimizer's group that projects may change from step to step."""


StepSettings = tuple[dict[str, Any], ...]
"""Settings ``SET_BY_HAND`` of each group in one step: numbers, or tuples of numbers."""


class LocalWork:
    """Counters of the steps, losses and learning rates of a group of visits, which run until `leave`.

    Args:
        optimizers: the module's optimizers; none before the first visit.
        changes_gradients: name of an algorithm that has to see gradients before each step; None if it need not.
        forward: `ForwardSteps` of the group (its module imports this one); None for backpropagation.

    Attributes:
        settings: index of an optimizer -> for each of its steps so far the settings of its groups, ``SET_BY_HAND``.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], changes_gradients: str | None = None, forward: Any = None
    ) -> None:
        self.forward = forward
        self._rate_scale = 1.0 if forward is None else forward.settings.lr_scale
        self._optimizers = optimizers
        self._changes_gradients = changes_gradients
        self._announced: set[int] = set()
        self._lr = self._rate_scale * _first_rate(optimizers)
        self.settings: dict[int, list[StepSettings]] = defaultdict(list)
        self._lr_sums: dict[int, float] = defaultdict(float)
        self._steps = 0
        self._backward_since_step = False
        self._losses: list[Tensor] = []
        self._started = time.perf_counter()
        self._depth: dict[int, int] = defaultdict(int)
        self._hooks = []
        for optimizer in optimizers:
            # Torch's hooks count steps: LBFGS evaluates its closure many times in one, and 16-bit scaling leaves some out.
            _check_hooks(optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(self._steps_now))
            self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    def announce(self, optimizer: Optimizer) -> None:
        """Note that Lightning is about to step this optimizer; called at each evaluation of the closure."""
        # A loss scale may still leave the step out; its gradients are then discarded, not unused.
        self._backward_since_step = False
        self._announced.add(id(optimizer))

    def _steps_now(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth[id(optimizer)] += 1

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Count an optimizer step and its learning rates."""
        self._depth[id(optimizer)] -= 1
        if self._depth[id(optimizer)]:  # a subclass's step has called its base class's step
            return
        if self._changes_gradients and id(optimizer) not in self._announced:
            raise ValueError(
                f"training_step stepped its {type(optimizer).__name__} past Lightning, so {self._changes_gradients} could "
                "not change the gradients: step what self.optimizers() gives, without use_pl_optimizer=False"
            )
        self._announced.discard(id(optimizer))
        held = [p for group in optimizer.param_groups for p in group["params"]]
        by_gradients = any(p.grad is not None for p in held)
        moved = by_gradients if self.forward is None else self.forward.step(optimizer)
        # Without gradients training_step gave None; of gradients that overflowed a fused kernel leaves the step out itself.
        if not moved or getattr(optimizer, "found_inf", None):
            return
        self._backward_since_step = False
        self._steps += 1
        # Now, since a schedule changes the rates after the step.
        self._lr = self._rate_scale * _first_rate(self._optimizers)
        rates = tuple(self._rate_scale * learning_rate(group) for group in optimizer.param_groups)
        number = next(i for i, known in enumerate(self._optimizers) if known is optimizer)
        self.settings[number].append(tuple(map(_set_by_hand, optimizer.param_groups)))
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            for parameter in group["params"]:
                self._lr_sums[id(parameter)] += lr

    def backward(self) -> None:
        """Note gradients that no optimizer step has used yet."""
        self._backward_since_step = True

    def refuse_unused_gradients(self, visit: Visit) -> None:
        """Raise ValueError for a visit that ended between a backward pass and the step that uses its gradients."""
        if self._backward_since_step:
            raise ValueError(
                f"the visit to client {visit.client_id} ended after {visit.num_batches} batches with gradients that no "
                "optimizer step has used: training_step makes one step of several batches, so set local_steps to "
                "a multiple of them; or it steps an optimizer inside of another, where the outer one has to make the step"
            )

    def add_losses(self, losses: Tensor | None) -> None:
        """Add the result of `step_losses` for a batch of the group."""
        if losses is not None:
            self._losses.append(losses)

    def leave(self, num_visits: int = 1) -> None:
        """Stop the clock, whose time the visits of the group share equally, and remove the hooks of the optimizers."""
        self._seconds = (time.perf_counter() - self._started) / num_visits
        for hook in self._hooks:
            hook.remove()
        if self.forward is not None:
            self.forward.leave()

    def done(self, place: int, parameters: Mapping[str, Tensor]) -> Work:
        """Return the work of the visit at ``place`` in the group, which trained ``parameters``."""
        losses = None
        if self._losses:
            losses = torch.stack([batch.reshape(-1) for batch in self._losses])[:, place].contiguous()
        return Work(
            self._steps,
            self._lr,
            None if losses is None else losses.mean(dtype=promote_types(losses.dtype, torch.float32)).item(),
            self._seconds,
            {name: self._lr_sums[id(p)] for name, p in parameters.items()},
            None if losses is None else losses[0].item(),  # at the start parameters
            () if self.forward is None else self.forward.gone(place),
        )


def learning_rate(group: Mapping[str, Any]) -> float:
    """Return the learning rate of an optimizer's group; 0 for an optimizer that finds its own."""
    return float(group.get("lr") or 0.0)


def _set_by_hand(group: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: group[name] for name in SET_BY_HAND if group.get(name) is not None}
    return {
        name: tuple(map(float, v)) if isinstance(v, (tuple, list)) else float(v)
        for name, v in settings.items()
    }


def _first_rate(optimizers: Sequence[Optimizer]) -> float:
    return learning_rate(optimizers[0].param_groups[0]) if optimizers else 0.0


def _check_hooks(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    if not hasattr(optimizer, "_optimizer_step_post_hooks") or not getattr(kind.step, "hooked", False):
        raise ValueError(
            f"{kind.__name__} does not call torch.optim.Optimizer.__init__, so its steps cannot be counted: call "
            "super().__init__(params, defaults) in it, or take another optimizer"
        )


CLIENT_LOSSES = "fedlight/client_losses"
"""Key of a step's outputs with the loss of each visit of a group that is trained in one batch."""


def step_losses(trainer: L.Trainer, outputs: Any) -> Tensor | None:
    """Return the loss of each visit under way from ``on_train_batch_end``'s ``outputs``.

    Its shape is ``(visits,)``, of one visit ``()`` or ``(1,)``. None without a loss, as may be under manual optimization.
    """
    if isinstance(outputs, Mapping) and CLIENT_LOSSES in outputs:
        losses: Tensor = outputs[CLIENT_LOSSES]
        return losses
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor):
        return None
    # Lightning has divided a copy of the loss. A plain 0, for a batch that is left out, may be on the CPU.
    return loss.detach().to(trainer.lightning_module.device) * trainer.accumulate_grad_batches


@dataclass
class OpenVisit:
    """Visit under way as the loop keeps it, with the module's parameters that the client trains, by name.

    ``bytes_down`` is received by the client, ``bytes_up`` sent back, 0 until then. ``trained`` holds its parameters trained
    beside other clients; None where it trains alone.
    """

    visiting: Visiting
    parameters: Mapping[str, Tensor]
    bytes_down: int
    bytes_up: int = 0
    trained: State | None = None

    def read(self) -> State:
        """Return a copy of the client's trained parameters, fp32 on the CPU."""
        if self.trained is not None and self.trained.keys() == self.parameters.keys():
            return {name: self.trained[name] for name in self.parameters}
        return read(self.parameters)


@dataclass
class OpenGroup:
    """Visits under way side by side, in the order of the plan; without visits before the first.

    Attributes:
        work: their common steps.
        beside: `SideBySide` that trains several clients in one batch; None for one visit alone, and when the group is over.
        forward: `ForwardSteps` of visits that train without gradients; None for backpropagation.
    """

    visits: list[OpenVisit] = field(default_factory=list)
    work: LocalWork = field(default_factory=lambda: LocalWork(()))
    beside: Any = None
    forward: Any = None

    def adjust_gradients(
        self, algorithm: Algorithm, parameters: Mapping[str, Tensor], optimizer: Optimizer
    ) -> None:
        """Let the algorithm change the gradients of each visit, of the parameters that an optimizer holds."""
        if self.forward is not None:  # it shows the algorithm one estimate after the other
            return
        if self.beside is None:
            adjust_gradients(algorithm, self.visits, parameters, optimizer)
        else:
            self.beside.adjust_gradients(algorithm, optimizer)

    def unstack(self) -> list[State]:
        """End the visits of several clients in one batch; return each one's parameters, none where one trains alone."""
        beside, self.beside = self.beside, None
        return [] if beside is None else beside.leave()


class Exchange:
    """Messages between the server and the clients in the visits of one round.

    Args:
        seed: seed of random draws in the channel.
        state: shared parameters of the server.
        further_bytes: bytes that travel beside the parameters here, one way: of buffers, and of parts in other processes.
        model_for: function from a visit and the newest model to the visit's start model; None: the newest.
        keeps_factors: whether the aggregation has to know which LoRA factors clients have received and kept.

    Attributes:
        message: state that has gone down last, cut to the client's LoRA rank; None for nothing.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        channel: Channel,
        seed: int,
        round_idx: int,
        state: State,
        further_bytes: int = 0,
        model_for: Callable[[Visit, State], State] | None = None,
        keeps_factors: bool = False,
    ) -> None:
        self.algorithm = algorithm
        self.channel = channel
        self.seed = seed
        self.round_idx = round_idx
        self.state = state
        self.further_bytes = further_bytes
        self.model_for = model_for
        self.keeps_factors = keeps_factors
        self.message: State | None = None
        self._arrived: tuple[Visiting, State] | None = None

    def down(self, visit: Visit, client: Client, before: Visiting | None) -> tuple[Visiting, int]:
        """Send the algorithm's message at the start of a visit; return the visit under way and the bytes down.

        ``before`` is the client's previous visit in the round.
        """
        received, num_bytes = self._receive(visit, client)
        if received is None:  # it has what its visit before has received
            received = before.received if before else {}
        visiting = self.algorithm.start_visit(visit, client, received)
        visiting.before = before
        return visiting, num_bytes

    def _receive(self, visit: Visit, client: Client) -> tuple[State | None, int]:
        """Return the algorithm's message as the client receives it, None for nothing, and its bytes."""
        model = self.state if self.model_for is None else self.model_for(visit, self.state)
        sent = self.message = message_to(self.algorithm, visit, client, model)
        if sent is None:
            return None, 0
        received, payload = self._send_down(sent, client)
        return received, self._with_buffers(payload)

    def _send_down(self, sent: State, client: Client) -> tuple[State, Payload]:
        """Return a state as the client receives it, and the payload that travels."""
        self.message, payload = sent, self.channel.down(sent, client)
        return payload.state, payload

    def up(self, visiting: Visiting, trained: State, work: Work) -> tuple[Update | None, int]:
        """Send the client's reply to the server at the end of a visit; return its update, if it gives one, and the bytes up.

        Raises Diverged, and sends nothing, if something is not finite.
        """
        refuse_not_finite(trained, "trained")  # the client looks before it sends
        reply = self.algorithm.reply(visiting, trained, work)
        seed_all(self.seed, "wire", self.round_idx, *visiting.visit.purpose)
        movement, payload = self._send_up(visiting, reply)
        return self.arrived(visiting, movement, trained, work), self._with_buffers(payload)

    def _send_up(self, visiting: Visiting, reply: State) -> tuple[State, Payload]:
        """Return the movement that reaches the server with a reply, and the payload that travels."""
        others = reply.keys() - self.state.keys()  # no parameters, such as control variates
        payload = self._carry_up(visiting.received, reply, visiting.client, others)
        refuse_not_finite(payload.state, "the movement of")
        return payload.state, payload

    def _carry_up(self, received: State, reply: State, client: Client, others: Set[str]) -> Payload:
        return self.channel.up(received, reply, client, others)

    def arrived(self, visiting: Visiting, movement: State, trained: State, work: Work) -> Update | None:
        """Take the movement that has reached the server at the end of a visit; return its update, if it gives one.

        Raises Diverged if its weight is not finite.
        """
        received = visiting.received
        update = self.algorithm.finish_visit(visiting, movement, work)
        if update is not None and not math.isfinite(update.weight):
            raise Diverged(f"its weight {update.weight} is not finite")
        if update is not None:
            if self.keeps_factors:
                update = with_factors(update, received, trained, self.state)
            federated = {name: value for name, value in movement.items() if name in self.state}
            if isinstance(self.algorithm, RebuildsUploads):  # it rebuilds a model from all values
                federated = movement
            if federated:  # else no model can be rebuilt from it
                self._arrived = visiting, federated
        return update

    def _with_buffers(self, payload: Payload) -> int:
        return payload.num_bytes + self.further_bytes if payload.state else payload.num_bytes

    def call_on_upload(self, callbacks: Sequence[L.Callback]) -> None:
        """Call ``on_upload`` of the callbacks that have it, if the last visit has given an upload.

        Other values that an algorithm sends, such as control variates, are left out. Factors cut to a smaller LoRA rank
        are padded with zeros.
        """
        # Or the movement would stay in memory during the next visit.
        arrived, self._arrived = self._arrived, None
        # hasattr: in Python 3.11 a look at the Protocol takes ten times as long, at each callback of each visit.
        takers = [callback for callback in callbacks if hasattr(callback, "on_upload")]
        if arrived is None or not takers:
            return
        visiting, movement = arrived
        if isinstance(self.algorithm, RebuildsUploads):
            uploaded = self.algorithm.uploaded(visiting, movement)
        else:
            uploaded = moved({name: visiting.received[name] for name in movement}, movement)
        whole = {name: pad_to(value, self.state[name].shape) for name, value in uploaded.items()}
        for taker in takers:
            taker.on_upload(Upload(self.round_idx, visiting.client.id, whole))


class RankedExchange(Exchange):
    """Messages of clients with LoRA adapters of unlike ranks: see `fedlight.federation.lora.ranks`."""

    def down(self, visit: Visit, client: Client, before: Visiting | None) -> tuple[Visiting, int]:
        visiting, num_bytes = super().down(visit, client, before)
        visiting.lora_rank = rank_of(client)
        return visiting, num_bytes

    def _send_down(self, sent: State, client: Client) -> tuple[State, Payload]:
        rank = rank_of(client)
        received, payload = super()._send_down(cut_to_rank(sent, rank), client)
        return pad_like(received, sent, rank), payload

    def _send_up(self, visiting: Visiting, reply: State) -> tuple[State, Payload]:
        rank = visiting.lora_rank
        refuse_moved_zeros(reply, rank)
        cut = replace(visiting, received=cut_to_rank(visiting.received, rank))
        movement, payload = super()._send_up(cut, cut_to_rank(reply, rank))
        return pad_like(movement, reply, rank), payload


def exchange_of(loop: Any, state: State, keeps_factors: bool) -> Exchange:
    """Return the messages of the round of a `FederatedLoop` that begins with the shared parameters ``state``."""
    kind = RankedExchange if isinstance(loop.algorithm, UnlikeRanks) else Exchange
    return kind(
        algorithm=loop.algorithm,
        channel=loop.channel,
        seed=loop.seed,
        round_idx=loop.rounds_done,
        state=state,
        further_bytes=loop.buffers.num_bytes + loop._run.bytes_elsewhere,
        model_for=None if loop._buffered is None else loop._buffered.model_for,
        keeps_factors=keeps_factors,
    )


@runtime_checkable
class RebuildsUploads(Protocol):
    """Algorithm whose clients do not reply with parameters; the server rebuilds their models from the replies."""

    def uploaded(self, visiting: Visiting, movement: State) -> State:
        """Return the client's parameters as the server, or an attacker there, can rebuild them from its reply."""


@runtime_checkable
class TakesUpload(Protocol):
    """Callback of the trainer that sees every upload when it arrives at the server.

    With several processes it sees those of one process; it is refused unless its class has ``shares_uploads = True``
    and it gathers its findings once a round, with `fedlight.processes.work.merged` or ``current_team().gather``.
    """

    def on_upload(self, upload: Upload) -> None:
        """Look at the upload of a finished visit, without changing the module."""


logger = logging.getLogger("fedlight")


def refuse_lost_model(state: State, round_idx: int, server: ServerOptimizer) -> None:
    """Raise ValueError if the server's step has made a non-finite global model out of finite updates."""
    for name, value in state.items():
        if not is_finite(value):
            raise ValueError(
                f"round {round_idx + 1}: {name} of the global model is not finite after the step of "
                f"{type(server).__name__}, so the run ends with the global model of the round before: lower "
                f"server.lr={server.lr}, or the learning rate of the clients"
            )


def adjust_gradients(
    algorithm: Algorithm, visits: Sequence[OpenVisit], parameters: Mapping[str, Tensor], optimizer: Optimizer
) -> None:
    """Let the algorithm change the gradients of visits that train alone, of the parameters that an optimizer holds."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    stepped = {name: p for name, p in parameters.items() if id(p) in held and p.requires_grad}
    for open_visit in visits:
        # Terms of an algorithm are dense, so it is given no sparse gradient.
        gradients = {name: p.grad.to_dense() for name, p in stepped.items() if p.grad is not None}
        if not gradients:  # training_step gave None, and the step is left out
            continue
        with_one = [*gradients]
        algorithm.adjust_gradients(open_visit.visiting, stepped, gradients)
        for name in {*with_one, *gradients}:
            if stepped[name].grad is not gradients.get(name):
                stepped[name].grad = gradients.get(name)


@runtime_checkable
class TakesVisitStart(Protocol):
    """LightningModule or callback of the trainer that is called when a client's visit begins."""

    def on_visit_start(self, client_id: str) -> None:
        """Start a visit: the module holds the client's initial parameters, and no step is done."""


def call_on_visit_start(trainer: L.Trainer, module: L.LightningModule, client_id: str) -> None:
    """Call ``on_visit_start`` of the module and then of the callbacks that have it, in their order."""
    for hearer in (module, *trainer.callbacks):  # type: ignore[attr-defined]
        if hasattr(hearer, "on_visit_start"):  # not by the Protocol: see call_on_upload
            hearer.on_visit_start(client_id)


def use_adapter(module: L.LightningModule, visiting: Visiting) -> None:
    """Activate the adapter of a visit, if it names one."""
    if visiting.adapter is not None:
        assert isinstance(module, HoldsAdapters)
        module.use_adapter(visiting.adapter)


def use_first_adapter(module: L.LightningModule) -> None:
    """Activate the first of several adapters: the last visit's would follow from the order and the processes of visits."""
    if isinstance(module, HoldsAdapters) and len(module.adapter_names) > 1:
        module.use_adapter(module.adapter_names[0])


HOOK = "on_train_batch_end"


def call_modules_own(
    trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
) -> None:
    """Call the module's ``on_train_batch_end`` now; Lightning's next call, behind the callbacks, does nothing."""
    call._call_lightning_module_hook(trainer, HOOK, outputs, batch, batch_idx)
    vars(module)[HOOK] = _Called(module, vars(module).get(HOOK))  # hides the class's method once


def call_again(module: L.LightningModule) -> None:
    """Undo `call_modules_own` if Lightning's call has not come, because of an error."""
    called = vars(module).get(HOOK)
    if isinstance(called, _Called):
        called()


class _Called:
    """Replacement of the hook for one call."""

    def __init__(self, module: L.LightningModule, before: Any) -> None:
        self._module, self._own = module, before

    def __call__(self, *_: object) -> None:
        if self._own is None:
            del vars(self._module)[HOOK]
        else:
            vars(self._module)[HOOK] = self._own


class ParametersLeft:
    """Sums of the federated parameters' bits at the end of a visit or a round, compared at the next hook."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Compare nothing at the next hook."""
        self._parameters: Mapping[str, Tensor] = {}

    def note(self, parameters: Mapping[str, Tensor], client_id: str) -> None:
        """Note the parameters that a visit has left."""
        self._parameters, self._client_id = parameters, client_id
        self._sums = _sums_of_words(parameters)

    def refuse_changed(self) -> None:
        """Raise ``ValueError`` if the parameters have changed since; the next call compares nothing."""
        now = _sums_of_words(self._parameters)
        changed = [name for name, total in now.items() if total != self._sums[name]]
        self.forget()
        if changed:
            raise ValueError(
                f"{changed[0]} was changed by a callback when the visit to client {self._client_id} was over and its work "
                f"had been taken: a callback that changes weights in {HOOK} has to stand in front of FederatedLoop among "
                "the trainer's callbacks"
            )


def _sums_of_words(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Return sums of the words of parameters, fp32 or fp64, as whole numbers; copies would be as large as the model."""
    words = {4: torch.int32, 8: torch.int64}
    sums = [p.detach().contiguous().view(words[p.element_size()]).sum() for p in parameters.values()]
    # A GPU is read once, or it would stand still for each parameter; a project may keep some on the CPU.
    together = [total.to(sums[0].device) for total in sums]
    return dict(zip(parameters, torch.stack(together).tolist() if sums else [], strict=True))


def skip_batches(module: L.LightningModule, round_idx: int, nobody_is_left: bool) -> ExitStack:
    """Make the module train nothing until the returned stack is closed, and log it if no process has a visit.

    The round is validated, logged and counted like any other.
    """
    if nobody_is_left:
        rank_zero_info(f"round {round_idx + 1}: nobody is left of those asked, so the model stays as it is")
    warnings.filterwarnings("ignore", "`training_step` returned `None`")
    skipping = ExitStack()
    for hook, skip in (("training_step", _skip), ("optimizer_step", _skip_step)):
        skipping.enter_context(replaced(module, hook, skip))  # the module may have hooks of its object alone
    return skipping


def _skip(*_: object) -> None:
    """Train nothing: without a loss Lightning goes on to the next batch."""


def _skip_step(epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
    """Step without gradients, which torch refuses to clip, on the loss that LBFGS needs; schedules expect a step."""
    closure()
    optimizer.optimizer.step(lambda: 0.0)
