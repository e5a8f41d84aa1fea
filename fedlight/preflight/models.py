"""Model checks: does every model exist, may it be fetched, and how large is the download?"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedlight.preflight.finding import Finding, ok, problem
from fedlight.preflight.hub import Hub, Report
from fedlight.preflight.machine import size_text
from fedlight.pretrained.hub import cached_file, find_model
from fedlight.support.needs import Model

SMALL = (".json", ".txt", ".model")


def check_models(wanted: Mapping[Model, Sequence[str]], hub: Hub, output: Path) -> Report:
    """Check each model once, given the names of the stages that load it; a model in ``output`` is written by a stage."""
    report = Report()
    for model in wanted:
        if Path(model.name).is_relative_to(output):
            continue
        if is_local(model.name):
            report.findings.append(_local(model))
        else:
            _at_hub(model, hub, report)
    return report


def is_local(name: str) -> bool:
    """Return whether a name is that of a folder, or surely no hub name."""
    return (
        name == "toy"
        or Path(name).expanduser().exists()
        or name.count("/") != 1  # a hub name is owner/name
        or name.startswith((".", "~", "/"))
    )


def _local(model: Model) -> Finding:
    what = f"model {model.name}"
    try:
        if model.is_encoder:
            from fedlight.datamodules.vectors.encoders import find_folder

            folder = find_folder(model.name)
        else:
            folder = Path(find_model(model.name))
    except OSError as error:
        return problem(what, str(error))
    weights = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    if not weights:
        return problem(what, f"{folder} has no .safetensors file: save the model anew with save_pretrained")
    return ok(what, f"here, {size_text(weights)} of weights")


def _at_hub(model: Model, hub: Hub, report: Report) -> None:
    what, cached = f"model {model.name}", _cached_weights(model.name)
    with report.asking(what, model.name, f"{size_text(cached)} of weights" if cached else None):
        repository = hub.repository(model.name, "model")
        report.configs[model.name] = hub.head(repository, "model", "config.json")
        # onnx/ and openvino/ have copies of the weights for other libraries; a language model's lie beside its config.
        weights = sum(
            size
            for path, size in repository.files.items()
            if path.endswith(".safetensors")
            and ("/" not in path or (model.is_encoder and not path.startswith(("onnx/", "openvino/"))))
        )
        if not weights:
            raise ValueError(
                "it has no .safetensors file, and no other format is read: take a model that has one"
            )
        if not cached:
            files = repository.files.items()
            small = (size for path, size in files if "/" not in path and path.endswith(SMALL))
            report.downloads[model.name] = weights + sum(small)
        state = f"{size_text(weights)} of weights, {'in the cache' if cached else 'to be fetched'}"
        report.findings.append(ok(what, state + repository.terms))


def _cached_weights(name: str) -> int:
    """Return the bytes of weights in the cache, 0 without a complete download."""
    config = cached_file(name, "config.json")
    return sum(file.stat().st_size for file in config.parent.rglob("*.safetensors")) if config else 0
