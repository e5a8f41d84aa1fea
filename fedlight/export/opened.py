"""The trained model of a finished or stopped run: its class, its settings, and where its weights lie."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedlight.callbacks.export.card_facts import CardFacts, card_facts, public_name
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.lightning_cli.class_names import class_of
from fedlight.modules.language import checkpoints
from fedlight.modules.language.adapter_folders import find_adapters
from fedlight.modules.language.module import LanguageModule
from fedlight.pretrained.hub import find_model
from fedlight.runs import facts
from fedlight.runs.facts import callbacks, data_of, within
from fedlight.runs.rows import epochs_done
from fedlight.runs.run import Run, read_runs
from fedlight.support.checkpoint_files import check_readable
from fedlight.support.words import number

LAST = "last"
FEDAVG = "fedlight.FedAvg"
ADAPTER = "adapter"
BEST = "exported/epoch"
"""Metric of `AdapterExport` with a ``monitor``: the epoch that it has exported, from 1."""


@dataclass(frozen=True)
class Opened:
    """Trained model of a run."""

    run: Run  # as a report reads it
    kind: type[LanguageModule]  # class of the module
    settings: dict[str, Any]  # the run's arguments of its constructor
    # folder that the run's `AdapterExport` wrote; None where the weights are a checkpoint's
    adapter: Path | None
    checkpoint: Path | None  # file of the weights; None for the adapter's folder

    @property
    def is_on_merged_base(self) -> bool:
        """Whether the run had merged another adapter into the base before it trained its own."""
        return bool(self.settings.get("merge_adapter"))

    @property
    def algorithm(self) -> type | None:
        """Class of the federated algorithm; None for pooled training, and for a class that cannot be imported."""
        federated = self.run.config().get("federated")
        return class_of(str(within(federated, "algorithm", "class_path") or FEDAVG)) if federated else None

    @property
    def names(self) -> list[str]:
        """Names of the adapters, ``["default"]`` for one."""
        if self.adapter is None:
            return list(self.kind(**self.settings).adapter_names)
        folders = find_adapters(str(self.adapter))
        return ["default"] if len(folders) == 1 else [Path(folder).name for folder in folders]

    def rounds(self) -> int | None:
        """Return the finished rounds in the weights, of pooled training epochs; None for the end of the run."""
        if self.checkpoint is not None:
            return _progress(self.checkpoint)[0]
        best = _last(self.run, None).get(BEST)  # where the run has exported its best epoch
        return None if best is None else int(best)

    def load(self, **changes: Any) -> LanguageModule:
        """Return the module with its trained weights, for inference.

        Args:
            changes: settings that differ from the run's, such as ``base="plain"``.

        Raises:
            OSError: the base cannot be loaded.
            ValueError: the weights do not fit it.
        """
        settings = {**self.settings, **changes}
        content: dict[str, Any] = {}
        if self.checkpoint is not None:
            check_readable(self.checkpoint)
            content = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        elif self.is_on_merged_base:
            raise ValueError(
                f"{self.run.label} trained on a base with another adapter merged into it, which its own adapter's "
                "folder does not hold: give --checkpoint last"
            )
        else:  # its folder says how many there are
            settings |= {"adapter": str(self.adapter), "num_adapters": 1}
        try:
            module = self.kind(**settings)
        except TypeError as error:
            raise ValueError(
                f"the config of {self.run.label} is not of this version of fedlight ({error}): take the one that trained it"
            ) from None
        module.configure_model()
        if content:
            saved = content.get(checkpoints.BASE_KEY)
            # A quantized base has another checksum than the plain one.
            if saved is None or saved.get("base") == module.base["base"]:
                checkpoints.check_base(saved, module.base)
            module.load_state_dict(content["state_dict"])
        return module.eval()


def open_run(folder: str | Path, checkpoint: str | None = None, model: str | None = None) -> Opened:
    """Return the trained model of a run's folder, or of the only run with one in a recipe's folder.

    Args:
        folder: ``trainer.default_root_dir`` of a command, or a stage of a recipe.
        checkpoint: a file of the run, or ``last``, the one with the most rounds and steps; None: the adapter that the run
            wrote at its end, else ``last``. A run that was continued and has not ended has no adapter of its end.
        model: where the base lies now; None: where the run found it.

    Raises:
        OSError: there is no such checkpoint or model.
        ValueError: there is no run with a trained language model, or there are several.
    """
    runs = [run for run in read_runs([folder]) if _adapter(run) is not None or _checkpoints(run)]
    if len(runs) > 1:
        names = ", ".join(str(run.folder.relative_to(run.home)) for run in runs[:6])
        raise ValueError(f"{folder}: it has {len(runs)} trained models: give one of them, such as {names}")
    if not runs:
        raise ValueError(
            f"{folder}: no run in it has written an adapter or a checkpoint: train with the callback AdapterExport or "
            "ModelCheckpoint"
        )
    (run,) = runs
    spec, given = run.config().get("model"), within(run.config(), "model", "init_args")
    settings = dict(given) if isinstance(given, dict) else {}
    if model is not None:
        settings["model"] = model
        find_model(model)
    path = str(within(spec, "class_path") or "")
    if not path:
        file = run.config_file()
        fault = f"{file} {run.faults.get(file, 'names no model')}" if file else "there is no config.yaml"
        raise ValueError(f"{folder}: {fault}, so nobody can tell what was trained: put the run's own back")
    kind = class_of(path)
    if kind is None or not issubclass(kind, LanguageModule):
        raise ValueError(
            f"{run.label} trained {path}, which is no LanguageModule of fedlight, or cannot be imported from here: only "
            "language models with adapters can be exported"
        )
    # After the end that wrote an adapter the run may have gone on: its checkpoints are newer.
    has_gone_on = run.record().get("state", "done") != "done" and _checkpoints(run)
    adapter = None if checkpoint or has_gone_on else _adapter(run)
    return Opened(run, kind, settings, adapter, None if adapter else _checkpoint(run, checkpoint or LAST))


def _adapter(run: Run) -> Path | None:
    """Return the folder that `AdapterExport` wrote: by its own name in the run's folder, which may have moved."""
    written = [
        Path(str(within(each, "init_args", "folder") or "")).name
        for each in callbacks(run)
        if str(each.get("class_path", "")).endswith("AdapterExport")
    ]
    folders = [run.folder / name for name in dict.fromkeys([*written, ADAPTER]) if name]
    names = ("adapter_config.json", "adapter*/adapter_config.json")  # of one, and of several
    files = [file for folder in folders for name in names for file in folder.glob(name)]
    of_run = {file for file in files if not run.is_earlier(str(file.relative_to(run.folder)))}
    return next((folder for folder in folders if any(folder in file.parents for file in of_run)), None)


def _checkpoints(run: Run) -> list[Path]:
    """Return the checkpoints in a run's folder, without those of a run that it was before it was started over."""
    files = sorted(run.folder.glob("**/*.ckpt"))
    return [file for file in files if not run.is_earlier(str(file.relative_to(run.folder)))]


def _progress(file: Path) -> tuple[int, int]:
    """Return finished rounds (of pooled training the epoch after this one) and steps of a checkpoint.

    Times and names of files say less: they are lost or sort otherwise when a run is copied.
    """
    check_readable(file)
    # With mmap the weights stay on the disk.
    content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    states = content.get("callbacks", {}).values()
    # A checkpoint from within a round holds the state from before it; the loop has counted up to there.
    done = [state["rounds_done"] for state in states if isinstance(state, dict) and "rounds_done" in state]
    rounds = number(done[0]) if done else (number(content.get("epoch")) or 0) + 1
    return int(rounds or 0), int(number(content.get("global_step")) or 0)


def _checkpoint(run: Run, wanted: str) -> Path:
    if wanted != LAST:
        if not Path(wanted).is_file():
            raise FileNotFoundError(
                f"--checkpoint {wanted}: there is no such file; {LAST} takes the run's newest"
            )
        written = [within(each, "init_args", "dirpath") for each in callbacks(run)]
        places = [run.folder, *(Path(folder) for folder in written if isinstance(folder, str))]
        # Links are followed, as checkpoints may be on another disk.
        if not any(Path(wanted).resolve().is_relative_to(folder.resolve()) for folder in places):
            raise ValueError(
                f"--checkpoint {wanted} is not in {run.folder}, nor where that run's ModelCheckpoint wrote: settings, "
                "scores and rounds would be another run's. Give the checkpoint's own run"
            )
        return Path(wanted)
    files = _checkpoints(run)
    if not files:
        raise FileNotFoundError(
            f"--checkpoint {LAST}: {run.label} has no checkpoint: leave it out for its adapter"
        )
    return files[0] if len(files) == 1 else max(files, key=_progress)  # one alone need not be read


def facts_of(opened: Opened) -> CardFacts:
    """Return the known facts of a run, of an earlier model up to its round; the hub is asked for the base's licence."""
    run, rounds = opened.run, opened.rounds()
    config = run.config()
    loop, data = (within(config, part, "init_args") or {} for part in ("federated", "data"))
    counts, last = data_of(run).counts, _last(run, rounds)
    if opened.checkpoint is None:
        # The privacy of the whole run holds for its best epoch, which was chosen at its end.
        last |= {name: value for name, value in _last(run, None).items() if name.startswith("fed/")}
    return card_facts(
        opened.kind,
        opened.algorithm,
        [opened.settings, loop, data],
        last,
        [row for row in run.csv("visits.csv") if _is_within((number(row.get("round")) or 0) + 1, rounds)],
        run.record(),
        True,  # the hub is asked
        # Also of one that cannot be imported.
        algorithm=facts.algorithm(run) if config.get("federated") else "",
        source=public_name(within(config, "data", "source")),
        clients=len(counts),
        examples=sum(sum(by_label.values()) for by_label in counts.values()),
        added=_added(run),
        rounds=facts.rounds(run)[0] if rounds is None else rounds,
    )


def _last(run: Run, rounds: int | None) -> dict[str, float]:
    """Return the last value of each metric, up to a round."""
    logged = run.metrics()
    done = epochs_done(logged)
    rows: list[Any] = [row for row, at in zip(logged, done, strict=True) if _is_within(at, rounds)]
    at_end = run.done().get("metrics") if rounds is None else None
    rows += [at_end] if isinstance(at_end, Mapping) else []
    return {name: value for row in rows for name, text in row.items() if (value := number(text)) is not None}


def _added(run: Run) -> int:
    """Return the number of rows that an augmentation added to the clients' own; 0 where no record tells."""
    folder = facts.augmentation_folder(run)
    try:
        return 0 if folder is None else sum(map(len, AugmentationRecord(folder).read().values()))
    except (OSError, ValueError, KeyError, TypeError):  # a damaged record
        return 0


def _is_within(done: float | None, rounds: int | None) -> bool:
    return rounds is None or done is None or done <= rounds  # a value without a round is of the whole run
