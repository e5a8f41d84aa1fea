"""``fedlight export RUN [--format FORMAT] [--output FOLDER] [--checkpoint FILE] [--push REPO]``."""

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedlight.export.formats import PACKAGES, TYPES
from fedlight.support.console import OneLineArguments
from fedlight.support.words import count_noun, first_line

FORMATS = ("adapter", "merged", "gguf", *PACKAGES)
REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``fedlight export``."""
    parser = OneLineArguments(
        "fedlight export",
        description="The trained model of a run for other programs, with a model card; no row of the data is in it.",
    )
    parser.add_argument("run", help="folder of a run, or of a stage of a recipe")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="adapter",
        help="adapter: a PEFT folder, of FedBiscuit all selectors and their vote (default); merged: base and adapter as "
        "one model of transformers; gguf: for llama.cpp, by its own converter; onnx, executorch: programs in fp32, by the "
        "exporters of transformers",
    )
    parser.add_argument("--output", type=Path, help="the folder; default: export/FORMAT in the run's folder")
    parser.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="these weights, or `last`; default: the adapter written at the run's end",
    )
    parser.add_argument("--model", help="hub name or folder of the base, where it has moved since the run")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="number type of a merged model; default: that of the run",
    )
    parser.add_argument("--converter", type=Path, metavar="FILE", help="convert_hf_to_gguf.py of llama.cpp")
    parser.add_argument("--outtype", choices=TYPES, default="f16", help="type of a GGUF file; default: f16")
    parser.add_argument("--push", metavar="REPO", help="upload the folder to this repository of the hub")
    parser.add_argument("--public", action="store_true", help="a new repository may be read by everybody")
    return parser


def main(argv: list[str]) -> None:
    """Write the folder, push it if asked to, and print where it is."""
    parser = make_parser()
    options = parser.parse_args(argv)
    for name, form in (("dtype", "merged"), ("converter", "gguf"), ("outtype", "gguf")):
        if options.format != form and getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name} is for --format {form}")
    if options.public and not options.push:
        parser.error("--public is for --push")
    from fedlight.export.opened import open_run  # late: it loads torch, which --help need not
    from fedlight.export.write import check, export

    opened = open_run(options.run, options.checkpoint, options.model)
    output = options.output or opened.run.folder / "export" / options.format
    check(opened, output, options.format, options.converter)
    if not opened.run.is_done:
        rounds = opened.rounds()
        unit = "round" if opened.run.config().get("federated") else "epoch"
        after = (
            "those that it had written at an end" if rounds is None else f"after {count_noun(rounds, unit)}"
        )
        print(f"{opened.run.label} has no record of an end: the weights are {after}", file=sys.stderr)
    # The repository first: a refusal comes before the work.
    api = make_repo(options.push, options.public) if options.push else None
    export(opened, output, options.format, options.dtype, options.converter, options.outtype)
    print(f"export: {output}")
    if options.push:
        print(f"pushed: {push(output, options.push, api)}")


def make_repo(repo: str, public: bool, api: Any = None) -> Any:
    """Make the repository, unless it is there, and return the hub's client; nothing is exported in vain without it.

    Args:
        repo: ``owner/name``.
        public: whether everybody may read a new one.
        api: ``huggingface_hub.HfApi``, or what stands for it.

    Raises:
        OSError: the hub refuses it or cannot be reached.
        ValueError: the name is none of the hub.
    """
    if not REPO.fullmatch(repo):
        raise ValueError(f"--push {repo}: give the name of a repository at the hub, such as owner/name")
    if api is None:
        from huggingface_hub import HfApi

        api = HfApi()
    with _hub_said(repo):
        api.create_repo(repo, private=not public, exist_ok=True)
    return api


def push(folder: Path, repo: str, api: Any) -> str:
    """Upload a folder in one commit and return its address.

    Raises:
        OSError: the hub refuses it or cannot be reached.
    """
    with _hub_said(repo):
        # One commit: no download gets half of it.
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Export of fedlight")
    return f"https://huggingface.co/{repo}"


@contextmanager
def _hub_said(repo: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # its class depends on the HTTP library, which has changed several times
        raise OSError(
            f"--push {repo}: the hub says: {first_line(error)}; log in with `hf auth login` to an account that may write "
            "there, or check the network"
        ) from None
