"""Checkpoints of a federated run: each holds a finished round, whenever it is written.

Inside a round the module has one client's weights, and Lightning may save there: ``max_time``, ``should_stop``,
``save_on_exception``, ``every_n_train_steps``, a requeue by SLURM. A run cannot resume from the middle of a round, so such a
checkpoint holds the state from before the round, which is then trained again, bit for bit.

A round is over when Lightning has validated it, or at its end without validation. A checkpoint at its last batch still
holds the state from before it: a run resumed from the middle of a validation would have another metric.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.visits.visit import OpenGroup, call_again
from fedlight.federation.client import write
from fedlight.federation.client_state import ClientMemories
from fedlight.processes.joining import fail
from fedlight.support.checkpoint_files import damage_named
from fedlight.support.console import is_out_of_memory
from fedlight.support.pokes import checkpoint_connector, loading_checkpoint

COPIED_MIB = 256
"""Largest total size of tensors that are copied although they may be held by reference; a copy takes about 0.1 s."""


class HeldState:
    """Copy of a nested state of dicts, lists, tuples, tensors and plain values.

    Tensors are copied to the CPU. Tensors accepted by ``may_refer`` are held by reference if they take more than
    ``copied_mib`` together: frozen weights, and moments of a server optimizer that gives new tensors in each round.

    Args:
        may_refer: whether nothing is expected to change this tensor in place; called for each tensor.
        copied_mib: largest total size in MiB of these tensors that is copied anyway.

    Examples:
        >>> import torch
        >>> state = {"w": torch.zeros(1)}
        >>> held = HeldState(state, may_refer=lambda tensor: False)
        >>> state["w"] += 1
        >>> held.value()["w"].item()
        0.0
    """

    def __init__(
        self, state: Any, may_refer: Callable[[Tensor], bool], copied_mib: float = COPIED_MIB
    ) -> None:
        self._may_refer = may_refer
        self._references: list[tuple[str, Tensor, int]] = []
        self._refers = False
        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor) and self._can_refer(leaf)]
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._refers = total > copied_mib * 2**20
        self._state = self._hold(state, "")

    def value(self) -> Any:
        """Return the state in new containers; raise ValueError if a tensor held by reference was changed in place."""
        for where, tensor, version in self._references:
            if tensor._version != version:  # torch counts changes in place
                raise ValueError(
                    f"{where} was changed in place inside a round, so what it was before the round is lost and no "
                    "checkpoint can be written: replace the tensor by a new one, or register it as a buffer of the module"
                )
        return _containers(self._state)

    def copy_those(self, changes: Callable[[Tensor], bool]) -> None:
        """Copy tensors that are held by reference before they change."""
        stays = self._may_refer
        self._may_refer = lambda tensor: stays(tensor) and not changes(tensor)
        self._references = []
        self._state = self._hold(self._state, "")

    def _can_refer(self, tensor: Tensor) -> bool:
        # Inference tensors have no version, and meta tensors take no memory.
        return not tensor.is_inference() and not tensor.is_meta and self._may_refer(tensor)

    def _hold(self, value: Any, where: str) -> Any:
        if isinstance(value, Tensor) and not value.is_meta:
            if self._refers and self._can_refer(value):
                self._references.append((where, value.detach(), value._version))
                return value.detach()
            return value.detach().to("cpu", copy=True)
        if isinstance(value, dict):
            held = copy.copy(value)
            for key, item in value.items():
                held[key] = self._hold(item, f"{where}.{key}" if where else str(key))
            return held
        if type(value) in (list, tuple):  # a named tuple takes its fields one by one
            return type(value)(self._hold(item, f"{where}[{i}]") for i, item in enumerate(value))
        return copy.deepcopy(value)


class NotHeld(HeldState):
    """State that the project's hooks have not given; ``error`` is theirs."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def value(self) -> Any:
        """Raise ValueError: the state is wanted after all."""
        raise ValueError(
            "no checkpoint can be written inside this round, since the project gave none when it began "
            f"({type(self._error).__name__}: {self._error}): let on_save_checkpoint and state_dict do without the metrics "
            "of a validation, or save when rounds are over"
        ) from self._error

    def copy_those(self, changes: Callable[[Tensor], bool]) -> None:
        """Do nothing."""


def _containers(value: Any) -> Any:
    """Return the state with new dicts, lists and tuples around the same values."""
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():  # a Counter's update would add
            made[key] = _containers(item)
        return made
    return type(value)(map(_containers, value)) if type(value) in (list, tuple) else value


class RoundStart(L.Callback):
    """Callback that holds the checkpoint from before a round until the round is over, and makes the trainer save that one.

    It comes before all other callbacks, which may change the module and themselves when an epoch starts. Each round costs
    one copy of trained parameters, buffers and the callbacks' states; large tensors that stay as they are during a round are
    held by reference (`HeldState`). The ``loop`` is the `FederatedLoop`, whose module imports this one.
    """

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        self._own: HeldState | None = None
        self._checkpoint: HeldState | None = None
        self._data: dict[str, Any] = {}
        self._frozen: set[int] = set()
        self._settings: dict[str, Any] = {}
        self._round_idx = 0
        self._aside = ExitStack()
        self._reloads: int | None = None

    def reload_in_each_round(self, trainer: Any) -> None:
        """Make the trainer ask for its loaders in every round, since each has its own batches, until the run is over."""
        self._reloads = trainer.reload_dataloaders_every_n_epochs
        trainer.reload_dataloaders_every_n_epochs = 1

    def _reload_as_given(self, trainer: Any) -> None:
        if self._reloads is not None:
            trainer.reload_dataloaders_every_n_epochs, self._reloads = self._reloads, None

    def watch(self, trainer: Any) -> None:
        """Become the first of the trainer's callbacks, and write all its checkpoints."""
        # The objects are reused after an error. A broken round does not count; of one that only a validation has failed
        # the module has the result, so the loop keeps its own and refuses the trainer, which has not counted it.
        if self.is_open and not self._is_aggregated():
            self.loop.load_state_dict(self.loop.state_dict())
        self._release()
        self._trainer = trainer
        trainer.callbacks = [self, *(callback for callback in trainer.callbacks if callback is not self)]
        # A callback's hooks are not called for checkpoints of the weights alone, and others may come behind them.
        checkpoint_connector(trainer).dump_checkpoint = self.dump

    @property
    def is_open(self) -> bool:
        """Whether a round has begun and is not over."""
        return self._own is not None

    def remembered(self) -> dict[str, Any]:
        """Return the loop's state; inside a round, the state from before it."""
        held: dict[str, Any] = self._own.value() if self._own else self.loop.remembered()
        return held

    def dump(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint; replaces Lightning's method."""
        goes_on_from = loading_checkpoint(self._trainer)
        # Weights alone are those of the newest global model, which is there from the last batch on.
        if self._checkpoint is not None and not (weights_only and self._is_aggregated()):
            held = self._before_round(self._checkpoint)
        elif self._checkpoint is None and goes_on_from:  # which the run has not loaded completely yet
            held = dict(goes_on_from)
        else:
            return self._live(weights_only)
        return {key: held[key] for key in self._live(True) if key in held} if weights_only else held

    def _before_round(self, held: HeldState) -> dict[str, Any]:
        checkpoint: dict[str, Any] = held.value() | self._settings
        # The list of written files does not depend on the round.
        files = (callback for callback in self._trainer.callbacks if isinstance(callback, ModelCheckpoint))
        checkpoint["callbacks"].update((saver.state_key, saver.state_dict()) for saver in files)
        checkpoint["callbacks"][self.loop.state_key] = self.loop.state_dict()
        return self._with_saved(checkpoint)

    def _live(self, weights_only: bool | None) -> dict[str, Any]:
        connector = checkpoint_connector(self._trainer)
        # The class's method: the connector's own attribute is `dump`.
        return self._with_saved(type(connector).dump_checkpoint(connector, weights_only))

    def _with_saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Let parts change the loop's state, where the checkpoint has it."""
        if state := checkpoint.get("callbacks", {}).get(self.loop.state_key):
            self.loop._run.call(Part.saved, state)
        return checkpoint

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Copy the state of the datamodule before it is asked for a loader."""
        self._data = self._data_state()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hold the present checkpoint."""
        if self.is_open:  # the round was cut short, and the loop will refuse the next one
            return
        self.loop.memory.begin_round()
        self._round_idx = self.loop.rounds_done
        # The loop's own state is held apart: its tensors are replaced, never changed in place.
        self._own = HeldState(self.loop.remembered(), may_refer=lambda tensor: True)
        frozen = self._frozen = _frozen(trainer, pl_module)
        try:
            state = self._at_start(pl_module)
            self._checkpoint = HeldState(state, lambda tensor: _storage(tensor) in frozen)
        except Exception as error:  # hooks may ask for metrics before any validation
            self._checkpoint = NotHeld(error)

    def _at_start(self, module: L.LightningModule) -> dict[str, Any]:
        """Return the present checkpoint without the loop's state, as if the epoch had not begun."""
        everyone = self._trainer.callbacks
        self._trainer.callbacks = [each for each in everyone if each.state_key != self.loop.state_key]
        try:
            checkpoint = self._live(False)
        finally:
            self._trainer.callbacks = everyone
        if self.loop.rounds_done == 0:  # other callbacks may take any state as a sign of a finished epoch
            checkpoint["callbacks"] = {}
        fit_loop = checkpoint["loops"]["fit_loop"]
        for progress in fit_loop["epoch_progress"].values():
            progress["ready"] -= 1  # Lightning has counted this epoch already
        fit_loop["state_dict"].pop("combined_loader", None)  # the round gets a new loader
        data = self._trainer.datamodule
        checkpoint.pop(type(data).__qualname__, None)
        names = _names_of_settings(module) | (_names_of_settings(data) if data else set())
        self._settings = {name: checkpoint.pop(name) for name in sorted(names) if name in checkpoint}
        self._settings |= self._data  # from before the loader was made
        return checkpoint

    def also_trained(self, parameters: Iterable[Tensor]) -> None:
        """Copy frozen parameters that callbacks have added to the optimizers before the first visit of the round."""
        joined = self._frozen & {_storage(parameter) for parameter in parameters}
        if joined and self._checkpoint is not None:
            self._checkpoint.copy_those(lambda tensor: _storage(tensor) in joined)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin the visit, so that callbacks' work with its first batch, such as setting rates, is within it."""
        self.loop.begin_batch(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin the visit of a batch that is None: Lightning calls only this hook for it."""
        if batch is None:
            self.loop.begin_batch(trainer, pl_module, batch, batch_idx)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the global model in place of a client's for validation, where the run is stopped inside a round."""
        self.loop.left.refuse_changed()
        if self.is_open and not self._is_aggregated():
            self._aside.enter_context(self.loop.before_round())

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Release the checkpoint: the round is over, if it was not cut short."""
        self.loop._run.call(Part.agree)
        self._aside.close()
        if self._is_aggregated():
            self._release()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Release the checkpoint of a round that is over; after a stop inside it, restore the global model."""
        self.loop._run.call(Part.agree)
        self.loop.left.refuse_changed()
        if self._is_aggregated():
            self._release()
        elif self.is_open:
            self._break_off(pl_module)
        self._data = self._data_state()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Restore the global model, in case it is used further; say where the memory was not enough."""
        if is_out_of_memory(exception):
            clients = ", ".join(repr(visit.client_id) for visit in self.loop.visits)
            exception.add_note(
                f"in round {self.loop.rounds_done + 1}" + (f", while {clients} trained" if clients else "")
            )
        fail(exception)  # before other callbacks save something and wait for the other processes
        self._aside.close()
        self._reload_as_given(trainer)
        self._break_off(pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the trainer's callbacks; a checkpoint that is saved later may still be of a broken round."""
        self._reload_as_given(trainer)
        self._trainer.callbacks = [callback for callback in self._trainer.callbacks if callback is not self]

    def _break_off(self, module: L.LightningModule) -> None:
        """Restore the global model when the trainer stops inside a round; the round does not count."""
        loop = self.loop
        loop.group.work.leave()
        loop.group.unstack()  # its work is lost
        loop.group = OpenGroup()
        loop.left.forget()
        call_again(module)
        loop._skipping.close()
        loop._run.call(Part.abort)
        loop._run.devices.restore()  # parts have entered the visit after the device
        if loop._round is not None:
            loop._round.training.take(module, 0)
            write(loop._round.opened, loop._parameters)

    def _is_aggregated(self) -> bool:
        return self.is_open and self.loop.rounds_done > self._round_idx

    def _release(self) -> None:
        self._own = self._checkpoint = None
        if self.loop.memory.in_use:
            self.loop.memory.end_round()

    def _data_state(self) -> dict[str, Any]:
        """Return a copy of the datamodule's part of a checkpoint."""
        data = self._trainer.datamodule
        state = data.state_dict() if data else {}
        held = HeldState({type(data).__qualname__: state} if state else {}, may_refer=lambda tensor: False)
        return dict(held.value())


def _frozen(trainer: Any, module: L.LightningModule) -> set[int]:
    """Return storage addresses of the parameters that no optimizer holds."""
    trained = {id(p) for each in trainer.optimizers for group in each.param_groups for p in group["params"]}
    # A state_dict holds other tensor objects at the same storage.
    lies_at = {id(getattr(p, "held_here", p)): _storage(p) for p in module.parameters()}
    return set(lies_at.values()) - {at for identity, at in lies_at.items() if identity in trained}


def _names_of_settings(module: Any) -> set[str]:
    """Return the names of the hyperparameters in a checkpoint, which are kept as they are."""
    return {getattr(module, f"CHECKPOINT_HYPER_PARAMS_{end}") for end in ("NAME", "KEY", "TYPE")}


def _storage(tensor: Tensor) -> int:
    part: Any = tensor
    if hasattr(part, "to_local"):  # split among the processes of a client, it has no storage itself
        part = part.to_local()
    return int(part.untyped_storage().data_ptr())


def check_what_is_loaded(trainer: Any, memory: ClientMemories) -> None:
    """Make the trainer name a damaged checkpoint and refuse it: torch does not compare the checksums in the file.

    This reads the file once more: a third of a second for each GB that the system has in RAM.
    """
    connector = checkpoint_connector(trainer)

    def resume_start(checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        if not checkpoint_path:
            type(connector).resume_start(connector, checkpoint_path, weights_only)
            return
        memory.resumed_from = str(checkpoint_path)
        with damage_named(checkpoint_path):
            type(connector).resume_start(connector, checkpoint_path, weights_only)

    connector.resume_start = resume_start


def follow_what_is_saved(trainer: Any, memory: ClientMemories, state_key: str) -> None:
    """Notify the clients' memories when a checkpoint is on the disk; until then the last one needs its files."""
    strategy = trainer.strategy

    def save_checkpoint(
        checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        state = checkpoint.get("callbacks", {}).get(state_key, {}).get("memory", {})
        with memory.being_saved(state, filepath):
            type(strategy).save_checkpoint(strategy, checkpoint, filepath, storage_options)

    strategy.save_checkpoint = save_checkpoint
