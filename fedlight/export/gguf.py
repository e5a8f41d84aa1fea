"""GGUF file of a merged model, for llama.cpp, by llama.cpp's own converter.

The converter is the script ``convert_hf_to_gguf.py`` of https://github.com/ggml-org/llama.cpp, which no package of its
authors installs. It needs the package ``gguf``, which lies beside it in a clone.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = "convert_hf_to_gguf.py"
TYPES = ("f32", "f16", "bf16", "q8_0")
LINES = 3
HOURS = 6  # after which a converter is taken to hang; one that writes tens of gigabytes needs less than one


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


def convert(converter: Path, model: Path, file: Path, outtype: str, name: str) -> None:
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
