"""Objects of a config for one end of a deployment: module, datamodule, trainer and the settings of the loop."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    Timer,
)
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.logs.client_accuracy import ClientAccuracy
from fedlight.callbacks.logs.client_data import ClientData
from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.callbacks.loop.parts.buffered import refuse_by_round, refuse_private
from fedlight.callbacks.loop.parts.buffers import BufferPolicy
from fedlight.callbacks.loop.parts.malicious import Malicious
from fedlight.callbacks.loop.parts.order import privacy_part
from fedlight.federation.algorithms.assignments import KnownGroups
from fedlight.federation.forward.fedkseed import FedKSeed
from fedlight.federation.privacy import Private
from fedlight.lightning_cli.cli import FedlightCLI, find_config
from fedlight.support.settings_record import constructor_arguments

OF_SERVER = (
    *(Checkpoint, EarlyStopping, ProgressBar, ModelSummary, LearningRateMonitor, DeviceStatsMonitor, Timer),
    *(SaveConfigCallback, ClientAccuracy),  # also where a user has derived one
)
"""Callbacks that a node leaves to the server, beside fedlight's own."""
EMULATED_PARTS = {
    BufferPolicy: "buffers of a module are not sent",
    Malicious: "lies are simulated in the emulator alone",
}
"""Parts of the emulator -> why a deployment has none of them."""


class Parts(FedlightCLI):
    """Parsed config whose module, datamodule and loop are made, and whose trainers are made by `new_trainer`.

    Args:
        args: arguments of ``fedlight fit``, such as ``["--config", "selector.yaml"]``.
        keeps: whether a callback of the config is used at this end.
    """

    def __init__(self, args: Sequence[str], keeps: Callable[[Callback], bool]) -> None:
        self._keeps = keeps
        self._config: dict[str, Any] = {}
        self.callbacks: list[Callback] = []
        self.left_out: list[Callback] = []
        self.loop: FederatedLoop | None = None
        super().__init__(["fit", *(find_config(argument) for argument in args)])

    def before_instantiate_classes(self) -> None:
        """Refuse a setting that needs an emulated fleet: the loop's remedy for it does not exist in a deployment."""
        federated = self.config["fit"].get("federated")
        forward = federated.init_args.get("forward") if federated else None
        if forward and forward.init_args.only_where_needed:
            raise ValueError(
                "federated.forward.only_where_needed does not work under Flower: it asks emulated devices: leave it out"
            )

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> L.Trainer:
        given = config.pop("callbacks", None) or []
        for callback in [*(given if isinstance(given, list) else [given]), *callbacks]:
            if isinstance(callback, FederatedLoop):
                self.loop = callback  # its settings count: each end makes another loop
            elif callback is not None and not isinstance(callback, SaveConfigCallback):
                (self.callbacks if self._keeps(callback) else self.left_out).append(callback)
        self._config = config
        return None  # type: ignore[return-value]  # made by new_trainer

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""

    def settings(self) -> dict[str, Any]:
        """Return the settings of the federated loop, by the names of its constructor.

        Raises:
            ValueError: the config has no loop.
        """
        if self.loop is None:
            raise ValueError("the config has no key federated:, so there is nothing to deploy")
        settings = {name: getattr(self.loop, name) for name in constructor_arguments(FederatedLoop)}
        channel = settings["channel"]
        for part in (settings["aggregation"], getattr(channel, "private", None), *settings["parts"]):
            if isinstance(part, Private):
                part.keep_secret()  # server and nodes all know the seed
        return settings

    def say_left_out(self, end: str, reason: str) -> None:
        """Say which callbacks are not used at one end; of Lightning's own that is no news."""
        left_out = [type(callback).__name__ for callback in self.left_out]
        if names := [name for name in left_out if name not in dir(L.pytorch.callbacks)]:
            rank_zero_info(f"left out at the {end}: {', '.join(names)}, {reason}")

    def new_trainer(self, callbacks: Sequence[Callback], **changes: Any) -> L.Trainer:
        """Return a trainer of the config's settings, with changes, and the kept callbacks in front of ``callbacks``."""
        return L.Trainer(**(self._config | changes), callbacks=[*self.callbacks, *callbacks])


def kept_by_node(callback: Callback) -> bool:
    """Return whether a node uses a callback: one of the user's, which may change the training."""
    return not isinstance(callback, OF_SERVER) and not type(callback).__module__.startswith(
        "fedlight.callbacks."
    )


def kept_by_server(callback: Callback) -> bool:
    """Return whether the server uses a callback: any that needs no rows of clients, and no models that stay with them."""
    if isinstance(callback, ClientAccuracy):
        return not callback.own_models
    return not isinstance(callback, ClientData)


def judge_of(parts: Parts, trainer: Any) -> ClientAccuracy | None:
    """Return the callback that gets the results of the nodes' validation, by the trainer or its settings; None without one.

    Raises:
        ValueError: only a part of the rows would be validated.
    """
    judge = next((each for each in parts.callbacks if isinstance(each, ClientAccuracy)), None)
    limit = trainer.limit_val_batches
    if judge is None or limit == 0:
        return None
    if has_rows_for_validation(parts.datamodule):
        rank_zero_info("ClientAccuracy: nodes validate nothing: data.split.val_source has rows of the server")
        return None
    is_whole = limit is None or (isinstance(limit, float) and limit == 1)  # an integer 1 is one batch
    if not is_whole or trainer.check_val_every_n_epoch is None:
        raise ValueError(
            "ClientAccuracy has nodes validate all their rows after a round: leave trainer.limit_val_batches out, and set "
            "trainer.check_val_every_n_epoch to a number of rounds"
        )
    return judge


def refuse_undeployable(parts: Parts) -> None:
    """Raise ValueError for a config that a deployment does not run, as far as that is seen before anything is loaded."""
    refuse_unsupported(parts.settings())
    if not has_rows_for_validation(parts.datamodule):
        refuse_unknown_monitors(parts.callbacks)
        judge_of(parts, parts.config["fit"].trainer)
    refuse_loss_scale(parts.config["fit"].trainer.precision)


def refuse_loss_scale(precision: object) -> None:
    """Raise ValueError for a trainer's precision with a loss scale."""
    if precision == "16-mixed":
        raise ValueError(
            "trainer.precision=16-mixed has a loss scale, which is not sent: set bf16-mixed or 32-true"
        )


def refuse_unsupported(settings: dict[str, Any]) -> None:
    """Raise ValueError for settings of the loop that a deployment does not have."""
    algorithm, fleet = settings["algorithm"], settings["fleet"]
    ranks, noised = getattr(algorithm, "ranks", None), getattr(settings["channel"], "private", None)
    refused = (
        (
            f"fleet={type(fleet).__name__}",
            fleet is not None and fleet.devices,
            "a node is its own device: leave it out, or for buffered rounds set fleet.devices to null",
        ),
        (f"algorithm.ranks={ranks}", ranks is not None, "ranks by client are the emulator's: leave it out"),
        (
            f"algorithm={type(algorithm).__name__}",
            isinstance(algorithm, FedKSeed),  # its clients rebuild the model from the server's memory
            "it runs in the emulator alone: take another one, such as FedAvg",
        ),
        (
            "algorithm.assignment=KnownGroups",
            isinstance(getattr(algorithm, "assignment", None), KnownGroups),
            "nodes can name any groups, and new ones late: take another one, such as GreedyGroups",
        ),
        *(
            (
                f"{'channel.up' if part is noised else 'parts'}={type(part).__name__}",
                isinstance(part, Private) and part.epsilon is not None,
                # The server says how many rounds there are.
                "a node cannot check for how many rounds an epsilon is to last: set noise_multiplier, as the emulator does",
            )
            for part in (noised, *settings["parts"])
        ),
        *(
            (f"parts={type(part).__name__}", isinstance(part, kind), f"{reason}: leave it out")
            for part in settings["parts"]
            for kind, reason in EMULATED_PARTS.items()
        ),
    )
    for name, is_set, reason in refused:
        if is_set:
            raise ValueError(f"federated.{name} does not work under Flower: {reason}")
    if fleet is not None:
        refuse_by_round(algorithm)
        refuse_private(
            privacy_part(settings["aggregation"], settings["channel"], settings["parts"]) is not None
        )


def clients_needed(settings: dict[str, Any]) -> int:
    """Return the number of clients without which no run can start: of a round, or of a buffer and those at work."""
    asked, fleet = settings["clients_per_round"], settings["fleet"]
    return asked if fleet is None else max(fleet.buffered.concurrency or asked, fleet.buffered.buffer_size)


def has_rows_for_validation(datamodule: Any) -> bool:
    """Return whether the server has its own rows to validate on."""
    return getattr(datamodule, "val_rows", None) is not None


def refuse_unknown_monitors(callbacks: Sequence[Any]) -> None:
    """Raise ValueError for a callback that monitors a validation which the server does not make."""
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if monitor and not str(monitor).startswith(("fed/", "train/", "step", "epoch")):
            raise ValueError(
                f"{type(callback).__name__} monitors {monitor}, and the server has no rows to validate on: give it some, "
                "data.init_args.split.val_source, or monitor step or a value that begins with fed/"
            )
