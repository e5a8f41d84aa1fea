"""Checks of a node before it joins: versions, config, memory, data and model, the cheap ones first."""

import importlib.metadata
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedlight.devices.hardware import choose_device
from fedlight.devices.measure.machine import memory
from fedlight.flower.node import QUIET, versions
from fedlight.flower.parts import Parts, kept_by_node, refuse_undeployable
from fedlight.modules.language.adapters import trained_parameters
from fedlight.modules.language.module import LanguageModule
from fedlight.preflight.finding import Finding, State, ok, problem, unknown
from fedlight.preflight.machine import MachineMemory, size_text
from fedlight.preflight.memory import count_training, fits
from fedlight.pretrained.hub import cached_file
from fedlight.support.files import read_bytes
from fedlight.support.words import count_noun

MENDABLE = (ValueError, OSError, ModuleNotFoundError, RuntimeError)
BITS = {"int8": "8", "nf4": "4"}
GIB = 2**30


def check(arguments: Sequence[str], memory_gib: float | None = None) -> list[Finding]:
    """Return the findings, up to a failed check without which the next ones make no sense.

    Arguments are those of ``fedlight fit``, with the node's own settings. ``memory_gib`` is what training may take, None for
    all free memory.

    Raises:
        ValueError: ``memory_gib`` is not above 0.
    """
    if memory_gib is not None and not 0 < memory_gib < float("inf"):
        raise ValueError(f"--memory-gib {memory_gib}: give a number above 0")
    findings = [_versions()]
    with tempfile.TemporaryDirectory() as folder:  # a check leaves nothing in the run's folder
        try:
            parts = Parts([*arguments, f"--trainer.default_root_dir={folder}"], kept_by_node)
            refuse_undeployable(parts)
        except MENDABLE as error:
            return [*findings, problem("config", str(error) or type(error).__name__)]
        settings = parts.settings()
        steps = settings["local_steps"]
        visit = "one pass over the data" if steps is None else f"{steps} optimizer steps"
        findings.append(ok("config", f"{type(settings['algorithm']).__name__}; a visit is {visit}"))
        findings.append(_memory(parts, memory_gib))
        if findings[-1].state is not State.PROBLEM:
            findings += _data_and_model(parts, Path(folder))
    return findings


def last_line(findings: Sequence[Finding]) -> str:
    """Return whether the node can take part.

    Examples:
        >>> last_line([ok("a", ""), problem("b", "")])
        'this machine cannot take part: mend b'
    """
    wrong = [finding.what for finding in findings if finding.state is State.PROBLEM]
    open_ = [finding.what for finding in findings if finding.state is State.UNKNOWN]
    if wrong:
        return f"this machine cannot take part: mend {', '.join(wrong)}"
    return "this machine can take part" + (f"; it is not known about {', '.join(open_)}" if open_ else "")


def _versions() -> Finding:
    ours = ", ".join(f"{name} {number}" for name, number in versions().items())
    try:
        return ok("versions", f"{ours}, flwr {importlib.metadata.version('flwr')}; the server needs the same")
    except importlib.metadata.PackageNotFoundError:
        return problem("versions", f"{ours}; flwr is missing: pip install 'fedlight[flower]'")


def _memory(parts: Parts, memory_gib: float | None) -> Finding:
    """Return whether a visit fits into the free memory, counted on shapes as for a dry run."""
    config = parts.config["fit"]
    if not isinstance(parts.model, LanguageModule):
        kind = type(parts.model).__name__
        return unknown("memory", f"{kind} is no LanguageModule, so it cannot be counted beforehand")
    name = parts.model.options.model
    cached = cached_file(name, "config.json")
    known = {name: read_bytes(cached)} if cached else {}
    try:
        training = count_training("visit", config, name, known)
    except MENDABLE as error:
        return unknown("memory", str(error) or type(error).__name__)
    size, free = memory(choose_device("cuda" if training.cuda else "cpu"))
    room = size if free is None else free  # not known: macOS has no /proc/meminfo
    words = f"{size_text(room)} of {size_text(size)} are free here"
    if memory_gib is not None:
        room = int(memory_gib * GIB)
        words = f"--memory-gib {memory_gib:g} allows {size_text(room)}"
    finding = fits(training, MachineMemory(room, words))
    return Finding("memory", finding.state, finding.detail)


def _data_and_model(parts: Parts, folder: Path) -> Iterator[Finding]:
    trainer: Any = parts.new_trainer([], **QUIET, max_epochs=1, default_root_dir=str(folder))
    data, model = parts.datamodule, parts.model
    # Attached as by `fit`, which is not called: data and model read their trainer while they are set up.
    data.trainer, model.trainer = trainer, trainer
    trainer.datamodule = data
    trainer.strategy.connect(model)
    try:
        data.prepare_data()
        data.setup("fit")
        yield ok("data", _rows(data))
    except MENDABLE as error:
        yield problem("data", str(error) or type(error).__name__)
        return
    try:
        with trainer.init_module():  # on the trainer's device and in its precision
            model.setup("fit")
            model.configure_model()
        yield ok("model", _weights(model))
    except MENDABLE as error:
        yield problem("model", str(error) or type(error).__name__)


def _rows(data: Any) -> str:
    if not hasattr(data, "client_sizes"):
        return "it can be read; its clients are counted when the node joins"
    sizes = np.array([*data.client_sizes().values()])
    if not len(sizes):
        raise ValueError("there are no clients in it: check data.init_args.source and the clients' column")
    report = getattr(data, "report", None)
    long = "" if report is None else f"; {count_noun(report.too_long, 'example')} too long and left out"
    spread = f"{sizes.min():,} to {sizes.max():,} examples, {sizes.sum():,} in all"
    return f"{count_noun(len(sizes), 'client')} with {spread}{long}"


def _weights(model: Any) -> str:
    trained = sum(weight.numel() for weight in trained_parameters(model).values())
    if not isinstance(model, LanguageModule):
        return f"{type(model).__name__}, {trained:,} trained parameters"
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    # Quantized weights are bytes, and their type does not say how many bits a number has.
    widths = {weight.dtype.itemsize * 8 for weight in frozen if weight.is_floating_point()}
    bits = BITS.get(model.options.base) or "/".join(map(str, sorted(widths)))
    return f"{model.options.model}, a base of {bits} bits, {trained:,} trained parameters"
