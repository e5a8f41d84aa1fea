"""Files of a merged model for other programs: GGUF for llama.cpp, ONNX and ExecuTorch by the exporters of transformers.

llama.cpp's own converter is the script ``convert_hf_to_gguf.py`` of https://github.com/ggml-org/llama.cpp, which no package
of its authors installs. It needs the package ``gguf``, which lies beside it in a clone.

A model that writes text becomes two programs: ``prefill`` reads the prompt, ``decode`` one further token with the cache of
those before. ``transformers.exporters.ExportedModel`` opens the folder, and any other program reads the files in it.
"""

import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

SCRIPT = "convert_hf_to_gguf.py"
TYPES = ("f32", "f16", "bf16", "q8_0")
LINES = 3
HOURS = 6  # after which a converter is taken to hang; one that writes tens of gigabytes needs less than one
PACKAGES = {"onnx": ("onnx", "onnxscript"), "executorch": ("executorch",)}
"""Formats, and what their exporters need."""
EXPORTERS_SINCE = "5.23"
SAMPLE_TOKENS = 8  # length of the prompt that traces a program


def find_converter(given: Path | None = None) -> Path:
    """Return the converter: the file given, else the one in the search path of commands.

    Raises:
        FileNotFoundError: there is none.
    """
    if given is not None and not given.is_file():
        raise FileNotFoundError(f"--converter {given}: there is no such file; give {SCRIPT} of llama.cpp")
    path = str(given) if given is not None else shutil.which(SCRIPT)
    if path is None:
        raise FileNotFoundError(
            f"--format gguf needs llama.cpp's own converter: clone https://github.com/ggml-org/llama.cpp and give "
            f"--converter llama.cpp/{SCRIPT}, or put its folder into PATH"
        )
    return Path(path)


def write_gguf(converter: Path, model: Path, file: Path, outtype: str, name: str) -> None:
    """Write the GGUF file of a whole model with its tokenizer and its name, its weights of one of `TYPES`.

    Raises ValueError where the converter does not know the architecture or the tokenizer.
    """
    command = [sys.executable, str(converter), str(model), "--outfile", str(file), "--outtype", outtype]
    command += ["--model-name", name]  # else that of the folder
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=HOURS * 3600
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{converter.name} was stopped after {HOURS:g} hours: run it by hand on --format merged"
        ) from None
    if done.returncode or not file.is_file():
        # A traceback ends with its reason.
        said = [line for line in done.stderr.strip().splitlines() if line.strip()][-LINES:]
        missing = re.search(r"No module named '(\w+)", done.stderr)
        mend = f"; pip install {missing[1]}" if missing else ""
        raise ValueError(f"{converter.name} could not convert this model: {' '.join(said)}{mend}")


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
    import torch
    from transformers import AutoModelForCausalLM

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
