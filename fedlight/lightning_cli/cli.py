"""LightningCLI of ``fedlight fit|validate|test|predict``, with the key ``federated:``.

The key holds the federated loop; without it the same config trains centrally. It stands beside ``trainer:`` rather than in
``trainer.callbacks``, because only there can the command line override a single value of it
(``--federated.clients_per_round 8``). Configs may refer to each other's values with ``${...}``.
"""

import importlib
import os
import re
import sys
import warnings
from contextlib import nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import lightning as L
from jsonargparse import Namespace, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from omegaconf.errors import OmegaConfBaseException

from fedlight.callbacks.logs.trainer import find_callback, is_out_of_time, timers
from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.callbacks.loop.guard import refuse_cut_rounds, refuse_senseless
from fedlight.conf import path as conf_path
from fedlight.federation.protocols import FederatedData
from fedlight.lightning_cli.class_names import (
    CLASS_FILES,
    DROPPED,
    arguments_go_with_their_class,
    class_of,
    last_part,
    whole_path,
)
from fedlight.lightning_cli.config_files import EXTENDS, with_layers
from fedlight.lightning_cli.full_keys import full_keys
from fedlight.lightning_cli.given_once import share_settings
from fedlight.lightning_cli.parser_words import one_line, one_line_reference, refuse_no_settings
from fedlight.lightning_cli.run_folder import alone_in
from fedlight.lightning_cli.run_record import recorded
from fedlight.lightning_cli.second_fit import FitFolder, KeptMetrics, checkpoints_of
from fedlight.lightning_cli.values_as_written import (
    integers_before_fractions,
    loaded_as_written,
    typed_templates,
)
from fedlight.support.checkpoint_files import check_readable, check_resumable
from fedlight.support.files import full_disk_named
from fedlight.support.pokes import parser_function, set_parser_function
from fedlight.support.words import near

ELSEWHERE = re.compile(r"best|last|hpc|registry(:.*)?|\w+://.*")
"""Checkpoints that Lightning looks up itself: its keywords, and addresses."""


@runtime_checkable
class ChecksSettings(Protocol):
    """Callback that can tell from settings alone, before rows are read and a model is loaded, that a run would fail."""

    def check_settings(self, module: L.LightningModule, data: L.LightningDataModule | None) -> None:
        """Raise ValueError for a module or data that do not suit it; neither has been set up."""


def drop_callbacks(config: Namespace) -> None:
    """Take the classes that ``drop_callbacks`` names out of ``trainer.callbacks``, all entries of each, in place.

    The key is empty then, so that the config that a run saves can be given again.

    Raises:
        ValueError: no callback is of a class that is named.
    """
    if not config.drop_callbacks:
        return
    callbacks = config.trainer.get("callbacks") or []
    entries = callbacks if isinstance(callbacks, list) else [callbacks]
    there = [last_part(entry.class_path) for entry in entries]
    dropped = {last_part(name) for name in config.drop_callbacks}
    if unknown := sorted(dropped - set(there)):
        raise ValueError(
            f"drop_callbacks: {unknown[0]!r} is none of trainer.callbacks{near(unknown[0], there)}; there are "
            f"{', '.join(there) or 'none'}"
        )
    config.trainer.callbacks = [
        entry for entry, name in zip(entries, there, strict=True) if name not in dropped
    ]
    config.drop_callbacks = []


class OneLineParser(LightningArgumentParser):
    """Parser that reports an error in one line instead of a page of everything that could have been given."""

    def parse_args(self, args: Any = None, *others: Any, **options: Any) -> Any:
        """Parse arguments; drop those of a class where another one is named, keep templates and ``null`` inside a class.

        jsonargparse 4.53 turns such a ``null`` into the text None.
        """
        given, texts = typed_templates(sys.argv[1:] if args is None else args)
        args = with_layers([re.sub(r"^(--[^=]+)=None$", r"\1=null", argument) for argument in given])
        try:
            with arguments_go_with_their_class(), loaded_as_written(self.parser_mode, texts):
                return super().parse_args(args, *others, **options)
        except OmegaConfBaseException as error:
            raise ValueError(one_line_reference(error.full_key, str(error))) from error

    def instantiate(self, *args: Any, **options: Any) -> Any:
        """Make the objects; raise a constructor's exception, at any depth, as it is.

        The parser itself catches it, since another type might still take the value, and reports the refusals of all types.
        """
        refusals: list[Exception] = []

        def make(class_type: Any, *args: Any, **options: Any) -> Any:
            try:
                return class_type(*args, **options)
            except Exception as error:
                refusals.append(error)
                raise

        try:
            return super().instantiate(*args, **{"instantiators": [(make, object, True)], **options})
        except Exception as error:
            if refusals:
                raise refusals[-1] from None
            raise ValueError(one_line(str(error))) from error

    def save(self, *args: Any, **options: Any) -> None:
        """Write settings, which were checked when they were parsed."""
        super().save(*args, **{**options, "skip_validation": True})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the program with exit code 2; ``FEDLIGHT_TRACEBACK=1`` shows the parser's whole message."""
        if os.environ.get("FEDLIGHT_TRACEBACK") or not self.exit_on_error:  # parsers of nested classes raise
            super().error(message, ex)
        below = [action.choices.values() for action in self._actions if isinstance(action.choices, dict)]
        parsers = [self, *chain.from_iterable(below)]  # with that of the command
        keys = {action.dest for parser in parsers for action in parser._actions if action.option_strings}
        line = one_line(message, keys, DROPPED)
        print(f"fedlight: {line}\n(FEDLIGHT_TRACEBACK=1 shows more)", file=sys.stderr)
        sys.exit(2)


def find_by_name() -> None:
    """Make all parsers of this process find fedlight's classes by their names alone.

    jsonargparse looks for a name among the imported classes that derive from the expected one. A protocol has none.
    """
    for file in sorted(set(CLASS_FILES.values())):
        importlib.import_module(f"fedlight.{file}")
    theirs = parser_function("path by name")
    if theirs.__module__ == __name__:
        return

    def path_of(expected: Any, name: str) -> str:
        with suppress(ValueError):  # a project's class of the same name does not make fedlight's ambiguous
            path: str = theirs(expected, name)
            if "." in path:
                return path
        kind = class_of(name) if name in CLASS_FILES else None
        takes_any = not isinstance(expected, type) or getattr(expected, "_is_protocol", False)
        is_ours = kind is not None and (takes_any or issubclass(kind, expected))
        return whole_path(name) if is_ours else str(theirs(expected, name))

    set_parser_function("path by name", path_of)


class FedlightCLI(LightningCLI):
    """LightningCLI for any LightningModule and LightningDataModule, federated if ``federated:`` is given.

    With ``resumes`` ``fit`` looks for a run in its folder first, see `fedlight.lightning_cli.second_fit`. ``parsed`` are the
    settings that `ReadSettings` has parsed of the same arguments.
    """

    def __init__(self, args: list[str], resumes: bool = False, parsed: Namespace | None = None) -> None:
        # Lightning's own call of a function that torch is about to rename.
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        find_by_name()
        integers_before_fractions()
        set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
        self.command, self.given, self._resumes = args[0], args, resumes
        self._parsed, self._starts_over = parsed, False
        super().__init__(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            # A federation is one process; Lightning's `auto` would take every GPU.
            trainer_defaults={"devices": 1},
            parser_class=OneLineParser,
            parser_kwargs={"parser_mode": "omegaconf+"},
            args=args,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``federated:``, without which training is centralised, ``drop_callbacks`` and ``resume``."""
        parser.add_lightning_class_args(FederatedLoop, "federated", subclass_mode=True, required=False)
        for name, kind, default, about in (
            ("drop_callbacks", list[str], [], "classes in trainer.callbacks to leave out"),
            ("resume", bool, True, "of fit: go on with the run in the folder; false starts over"),
            (EXTENDS, str | list[str] | None, None, "of a config: configs that it is laid over"),
        ):
            parser.add_argument(f"--{name}", type=kind, default=default, help=about)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the wanted command alone: building the parser of each takes half a second."""
        return {self.command: super().subcommands()[self.command]}

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse ``args`` alone; Lightning's own method warns that the process has arguments as well."""
        if self._parsed is not None:
            self.config = self._parsed.clone()
            return
        self.config = parser.parse_args(args)
        drop_callbacks(self.config[self.command])
        share_settings(self.config[self.command])
        self._starts_over = not self.config[self.command].resume
        self.config[self.command].resume = True  # the config that a run saves can be given again
        if self.config[self.command][EXTENDS]:
            raise ValueError("extends: is a key of config files; on the command line give --config twice")

    def instantiate_classes(self) -> None:
        """Make the objects; refuse a trainer that is no map of settings."""
        trainer = self.config[self.command].trainer
        if not isinstance(trainer, Namespace):
            raise ValueError(f"trainer: expected settings such as --trainer.max_epochs 3, given {trainer!r}")
        refuse_no_settings(self.config[self.command])
        with full_keys(self.config[self.command].as_dict()):
            super().instantiate_classes()

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> L.Trainer:
        """Make the trainer; refuse wrong values before it starts other processes or a module reads anything."""
        try:
            trainer = super()._instantiate_trainer(
                config, [KeptMetrics(), *(c for c in callbacks if c is not None)]
            )
        except (TypeError, ValueError, RuntimeError, MisconfigurationException) as error:
            names = ("accelerator", "devices", "strategy", "precision")
            named = {name: config[name] for name in names if config.get(name) not in (None, "auto")}
            given = ", ".join(f"{name}={value}" for name, value in named.items())
            other = config.get("accelerator") not in (None, "auto", "cpu")
            way = "; --trainer.accelerator auto takes what is there" if other else ""
            raise ValueError(f"trainer with {given or 'these settings'}: {error}{way}") from error
        refuse_senseless(trainer)
        if self.command == "fit" and any(isinstance(callback, FederatedLoop) for callback in callbacks):
            refuse_cut_rounds(trainer, rounds_done=0)
        return trainer

    def _set_seed(self) -> None:
        seed = self.config[self.command].seed_everything
        if not isinstance(seed, bool) and not 0 <= seed < 2**32:
            raise ValueError(f"seed_everything={seed} must be at least 0 and below 2**32")
        super()._set_seed()

    def _parse_ckpt_path(self) -> None:
        """Check the checkpoint before any work; Lightning's own method would replace settings by those in the checkpoint."""
        path = self.config[self.command].get("ckpt_path")
        if path and not ELSEWHERE.fullmatch(str(path)) and not Path(path).is_dir():  # a folder: a sharded one
            if self.command == "fit":
                check_resumable(path, federated=self.config[self.command].get("federated") is not None)
            else:
                check_readable(path)
        if path:
            _allow_checkpoints()

    def _run_subcommand(self, subcommand: str) -> None:
        with full_keys(self.config[self.command].as_dict()):
            self._check_and_run(subcommand)

    def _let_callbacks_check(self) -> None:
        if self.command == "fit":
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, ChecksSettings):
                    callback.check_settings(self.model, self.datamodule)

    def _check_and_run(self, subcommand: str) -> None:
        self._let_callbacks_check()
        folder = Path(self.trainer.default_root_dir)
        # Of a command with a folder for its results, the process that writes there.
        writes = self._names_folder() and self.trainer.is_global_zero
        alone: Any = alone_in(folder, "--trainer.default_root_dir") if writes else nullcontext()
        try:
            with full_disk_named(folder), alone:
                run = None  # without a folder, or where the caller says how it goes on
                if subcommand == "fit" and self._resumes and self._names_folder():
                    run = FitFolder(folder, self.config[subcommand].as_dict(), checkpoints_of(self.trainer))
                if run is not None and not self._finds_work(run):
                    return
                seed = self.config[subcommand].seed_everything
                record: Any = recorded(folder, subcommand, self.given, seed) if writes else nullcontext({})
                with record as ended:
                    if run is not None and self.trainer.is_global_zero:
                        run.begin(self._starts_over, self.config_init[subcommand].ckpt_path)
                    super()._run_subcommand(subcommand)
                    if subcommand == "fit":
                        loop = find_callback(self.trainer, FederatedLoop)
                        ended["epochs"] = self.trainer.current_epoch if loop is None else loop.rounds_done
                        # Without a federation the rest of an epoch would be lost: Lightning goes on with the next one.
                        is_early = loop is not None and loop.rounds_done < (self.trainer.max_epochs or 0)
                        if run is not None and is_early and is_out_of_time(self.trainer):
                            ended["state"] = "stopped"
                            print("stopped by trainer.max_time: the same command goes on", file=sys.stderr)
        except SystemExit as stop:  # into which Lightning turns a Ctrl-C
            if isinstance(stop.__context__, KeyboardInterrupt):
                newest = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
                by_itself = self._resumes and self._names_folder()
                way = "the same command goes on from it" if by_itself else f"--ckpt_path {newest} goes on"
                said = f"after a checkpoint: {way}" if newest else ""
                raise type(stop.__context__)(said) from None
            raise

    def _finds_work(self, run: FitFolder) -> bool:
        """Return whether there is something to do; set the checkpoint where the run goes on, and say so."""
        _allow_checkpoints()
        settings = self.config_init[self.command]
        written = list(checkpoints_of(self.trainer)) if settings.ckpt_path == "last" else []
        if written and not any(file.stem.startswith("last") for file in written):
            # Lightning would warn, and train anew over the run.
            raise ValueError(
                f"ckpt_path=last: no checkpoint of the run in {run.folder} is called last: leave it out to go on from the "
                "newest one, or give --ckpt_path FILE"
            )
        if self._starts_over or settings.ckpt_path:
            return True
        has_work = run.has_work(self.trainer.is_global_zero)
        if run.said and self.trainer.is_global_zero:
            print(run.said, file=sys.stderr, flush=True)
        if run.checkpoint:
            settings.ckpt_path = str(run.checkpoint)
            for timer in timers(self.trainer):
                setattr(timer, "load_state_dict", lambda state: None)  # noqa: B010 - each command has its whole time
        return has_work

    def _names_folder(self) -> bool:
        return bool(self.config[self.command].trainer.default_root_dir) and not self.trainer.fast_dev_run  # type: ignore[attr-defined]


class ReadSettings(FedlightCLI):
    """Settings of a command, parsed as ``fedlight fit`` does, without making objects or reading a checkpoint."""

    def instantiate_classes(self) -> None:
        """Make nothing."""

    def _set_seed(self) -> None: ...

    def _parse_ckpt_path(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


class CheckSettings(FedlightCLI):
    """Objects of a command, which refuse wrong settings when made; nothing is read, loaded or trained.

    Raises:
        OSError: a file cannot be read, possibly one of an earlier stage.
        ValueError: a setting is wrong, or settings do not suit each other.
    """

    def instantiate_classes(self) -> None:
        """Make the objects without loggers, as some loggers begin a record of the run when they are made."""
        self.config[self.command].trainer["logger"] = False
        super().instantiate_classes()

    def _set_seed(self) -> None: ...

    def _parse_ckpt_path(self) -> None: ...

    def _check_and_run(self, subcommand: str) -> None:
        self._let_callbacks_check()
        loop = find_callback(self.trainer, FederatedLoop)
        if subcommand == "fit" and loop is not None and isinstance(self.datamodule, FederatedData):
            setattr(self.trainer, "datamodule", self.datamodule)  # noqa: B010 - as `fit` does
            loop.check_run(self.trainer, self.model)
        super()._parse_ckpt_path()  # last: an earlier stage may write the checkpoint


def lightning_cli(argv: list[str], resumes: bool = False, parsed: Namespace | None = None) -> FedlightCLI:
    """Parse and run one Lightning command, as ``["fit", "--config", "fedbis.yaml"]``; return its objects.

    These are ``trainer``, ``model`` and ``datamodule``. With ``resumes`` ``fit`` goes on with the run in its folder, as on
    the command line; a stage of a recipe has compared its settings already, and names the checkpoint itself. ``parsed`` are
    the settings, where they are parsed already.
    """
    return FedlightCLI([find_config(argument) for argument in argv], resumes, parsed)


def _allow_checkpoints() -> None:
    """Leave out Lightning's warning about checkpoints in the folder: what happens with them has been said."""
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")


def find_config(argument: str) -> str:
    """Replace the name of one of fedlight's own configs by its path, unless there is such a file here.

    Examples:
        >>> find_config("--data=data/alpaca.yaml") == f"--data={conf_path('data/alpaca.yaml')}"
        True
    """
    option, equals, value = argument.rpartition("=")
    if value.endswith(".yaml") and not Path(value).is_file() and conf_path(value).is_file():
        return f"{option}{equals}{conf_path(value)}"
    return argument
