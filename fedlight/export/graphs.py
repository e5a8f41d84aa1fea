"""Programs of a merged model for ONNX Runtime and ExecuTorch, by the exporters of transformers.

A model that writes text becomes two programs: ``prefill`` reads the prompt, ``decode`` one further token with the cache of
those before. ``transformers.exporters.ExportedModel`` opens the folder, and any other program reads the files in it.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

PACKAGES = {"onnx": ("onnx", "onnxscript"), "executorch": ("executorch",)}
"""Formats, and what their exporters need."""
EXPORTERS_SINCE = "5.23"
SAMPLE_TOKENS = 8  # length of the prompt that traces a program


def check_installed(form: str) -> None:
    """Raise ModuleNotFoundError where the exporter of a format is not here."""
    if lost := [name for name in PACKAGES[form] if find_spec(name) is None]:
        raise ModuleNotFoundError(f"--format {form} needs {', '.join(lost)}: pip install 'fedlight[{form}]'")
    # Earlier exporters cannot save a program together with the parts that run it.
    if find_spec("transformers.exporters") is None or not hasattr(
        import_module("transformers.exporters"), "ExportedModel"
    ):
        raise ModuleNotFoundError(
            f"--format {form} needs the exporters of transformers {EXPORTERS_SINCE} or newer: "
            f"pip install --upgrade 'transformers>={EXPORTERS_SINCE}'"
        )


def write_programs(form: str, model: Path, folder: Path) -> None:
    """Write ``prefill`` and ``decode`` of a model in fp32, its config, and ``export.json``, which describes them.

    Args:
        form: ``onnx`` or ``executorch``; the latter is lowered to XNNPACK, the kernels for CPUs of phones.
        model: folder of a whole model that writes text.
        folder: empty.

    Raises:
        ValueError: the exporter does not know an operation of this architecture.
    """
    exporters = import_module("transformers.exporters")
    kind = "Onnx" if form == "onnx" else "Executorch"
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.full((1, SAMPLE_TOKENS), network.config.vocab_size // 2)  # special tokens are at the ends
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    settings = getattr(exporters, f"{kind}Config")(dynamic=True)  # prompts of other lengths work as well
    try:
        exported = getattr(exporters, f"{kind}Exporter")().export_for_generation(network, prompt, settings)
    except RuntimeError as error:
        said = str(error.__cause__ or error).strip().splitlines()
        raise ValueError(f"--format {form}: it was not exported: {said[0] if said else error}") from error
    exported.save_pretrained(folder)
