"""Is every model there, may it be had, and how much of it has to be fetched?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedlight.federation.needs import Model
from fedlight.modules.base_model import find_model
from fedlight.preflight.finding import Finding, ok, problem
from fedlight.preflight.hub import Hub, HubUnreachableError, Repository

GB = 10**9
SMALL = (".json", ".txt", ".model")


class ModelsReport(NamedTuple):
    """What was found of all models.

    Attributes:
        findings: one for each.
        downloads: hub name -> bytes that have to be fetched.
        unasked: names that the hub could not be asked about.
        configs: hub name -> its ``config.json``, fetched for the memory plan.
    """

    findings: list[Finding]
    downloads: dict[str, int]
    unasked: list[str]
    configs: dict[str, bytes]


def check_models(wanted: Mapping[Model, Sequence[str]], hub: Hub, output: Path) -> ModelsReport:
    """Checks each model once.

    Args:
        wanted: what is loaded, and by which stages.
        hub: is asked about what is no folder here.
        output: folder of the run; what lies in it is written by a stage.
    """
    report = ModelsReport([], {}, [], {})
    for model in wanted:
        if Path(model.name).is_relative_to(output):
            continue
        if is_local(model.name):
            report.findings.append(_local(model))
        else:
            _at_hub(model, hub, report)
    return report


def is_local(name: str) -> bool:
    """Is it a folder, or a text that is surely no name at the hub?"""
    return (
        name == "toy"
        or Path(name).expanduser().exists()
        or name.count("/") != 1
        or name.startswith((".", "~", "/"))
    )


def _local(model: Model) -> Finding:
    what = f"model {model.name}"
    try:
        if model.is_encoder:
            from fedlight.datamodules.sentence_folder import find_folder

            folder = find_folder(model.name)
        else:
            folder = Path(find_model(model.name))
    except OSError as error:
        return problem(what, str(error))
    weights = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    if not weights:
        return problem(what, f"{folder} has no .safetensors file: save the model anew with save_pretrained")
    return ok(what, f"here, {size_text(weights)} of weights")


def _at_hub(model: Model, hub: Hub, report: ModelsReport) -> None:
    what = f"model {model.name}"
    cached = _cached_weights(model.name)
    try:
        repository = hub.repository(model.name, "model")
        report.configs[model.name] = hub.file(repository, "model", "config.json")
    except HubUnreachableError:
        if cached:
            report.findings.append(ok(what, f"in the cache, {size_text(cached)} of weights"))
        else:
            report.unasked.append(model.name)
        return
    except ValueError as error:
        report.findings.append(problem(what, str(error)))
        return
    weights = _weights(repository, model)
    if not weights:
        report.findings.append(
            problem(
                what, "it has no .safetensors file, and no other format is read: take a model that has one"
            )
        )
        return
    missing = 0 if cached else weights
    if missing:
        report.downloads[model.name] = missing + _small(repository)
    state = f"{size_text(weights)} of weights, {'in the cache' if cached else 'to be fetched'}"
    terms = f"; license {repository.license}" if repository.license else "; its card names no license"
    gated = "; gated, and there is access" if repository.gated else ""
    report.findings.append(ok(what, state + terms + gated))


def _weights(repository: Repository, model: Model) -> int:
    """Bytes of what is loaded: of a language model the files beside its config, not further copies in folders."""
    return sum(
        size
        for path, size in repository.files.items()
        if path.endswith(".safetensors")
        and ("/" not in path or (model.is_encoder and not path.startswith(("onnx/", "openvino/"))))
    )


def _small(repository: Repository) -> int:
    return sum(size for path, size in repository.files.items() if "/" not in path and path.endswith(SMALL))


def _cached_weights(name: str) -> int:
    """Bytes of weights that an earlier download has left whole, else 0."""
    from huggingface_hub import try_to_load_from_cache

    config: Any = try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        return 0
    return sum(file.stat().st_size for file in Path(config).parent.rglob("*.safetensors"))


def size_text(size: float) -> str:
    """Bytes as people say them.

    Example:
        >>> size_text(16_060_556_376), size_text(1_340_616), size_text(900)
        ('16.1 GB', '1.3 MB', '0.0 MB')
    """
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / 10**6:.1f} MB"
