"""Page of ``fedlight fit --help``: fedlight's own keys, read from the source files without importing them.

The parser's own help needs Lightning, whose import takes five seconds of CPU, and begins with 40 keys of its trainer. Here
keys, defaults and texts are those of the classes' signatures and docstrings; ``--help all`` shows the parser's own help.
"""

import ast
import re
import shutil
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import fedlight
from fedlight.conf import configs
from fedlight.lightning_cli.class_names import CLASS_FILES

PURPOSE = {
    "fit": "Train one module: over the clients with `federated`, else on the pooled data.",
    "validate": "Compute one module's metrics on the validation data.",
    "test": "Compute one module's metrics on the test data.",
    "predict": "Write one module's predictions, such as completions of prompts.",
}
TRAINER = {
    "max_epochs": "rounds; epochs without `federated`",
    "default_root_dir": "folder of the results",
    "accelerator": "auto, cpu or gpu",
    "precision": "32-true, bf16-mixed or 16-mixed",
    "accumulate_grad_batches": "batches of an optimizer step",
    "gradient_clip_val": "largest norm of a client's gradient",
    "limit_val_batches": "batches of a validation; 0 leaves it out",
    "check_val_every_n_epoch": "rounds from one validation to the next",
    "callbacks": "what is measured and written on the way",
    "logger": "where metrics are written, such as a CSV file, TensorBoard or W&B",
}
"""Keys of Lightning's trainer that a federated run needs most, and their meaning there."""


class Setting(NamedTuple):
    """Argument of a class."""

    name: str
    default: str | None  # as in YAML; None for a required argument
    kind: str  # annotation's first name, such as ``Algorithm``
    about: str


def help_page(command: str) -> str:
    """Return the page of ``fit``, ``validate``, ``test`` or ``predict``."""
    modules = [name for name in classes_in("modules") if name.endswith("Module")]
    data = [name for name in classes_in("datamodules") if name.endswith("DataModule")]
    usage = f"usage: fedlight {command} --config FILE [--config FILE ...] [--KEY VALUE ...]"
    layers = "settings in YAML; a later file, and then the command line, overrides single values."
    parts = {
        f"{usage}\n\n{PURPOSE[command]}\n": {
            "--config FILE": f"{layers} fedlight's own: {', '.join(configs())}",
            "--print_config": "print all settings of this call, and do nothing",
            "--threads N": "threads of torch; 1 where other processes keep the cores busy",
            "--help all": "all keys, with their types and whole descriptions; takes seconds, as it imports Lightning",
            "--data.help CLASS": "all keys of a class; so with model, federated and trainer.callbacks",
        },
        "federated: an epoch is a round; null pools the data; classes: fedlight methods": _keys(
            "federated", "FederatedLoop"
        ),
        "model: a class, and its keys": {f"--model {name}": summary(name) for name in modules},
        "model, keys of all language models": _keys("model", "modules.language.module.LanguageModule"),
        "data: a class, and its keys": {
            f"--data {name}": summary(name) for name in data if name != "FederatedDataModule"
        },
        "data, keys of all classes": _keys("data", "FederatedDataModule"),
        "trainer: Lightning's Trainer; most used are": {
            f"--trainer.{name}": about for name, about in TRAINER.items()
        },
        "of the command": {
            "--ckpt_path FILE": "checkpoint from which a run goes on, or whose weights are used",
            "--resume false": "of fit: start over, instead of going on with the run in trainer.default_root_dir",
            "--drop_callbacks '[NAME]'": "classes in trainer.callbacks to leave out; a config may have the key",
            "--seed_everything 0": "seed of what has no seed of its own",
        },
    }
    short = ("federated", "model", "data")  # of classes one line each; `--help all` has the rest
    blocks = [
        f"{heading}\n{_lines(entries, heading.startswith(short))}" for heading, entries in parts.items()
    ]
    # Keys of all classes follow those classes without a gap.
    return re.sub(r"\n\n(model|data), keys", r"\n\1, keys", "\n\n".join(blocks))


def wants_help(arguments: list[str]) -> str:
    """Return ``page`` or ``all`` if a command's arguments ask for help, else an empty text.

    Examples:
        >>> wants_help(["--help"]), wants_help(["-h", "all"]), wants_help(["--data.help", "FewShot"])
        ('page', 'all', '')
    """
    asked = [place for place, word in enumerate(arguments) if word in ("-h", "--help")]
    if not asked:
        return ""
    return "all" if arguments[asked[0] + 1 : asked[0] + 2] == ["all"] else "page"


def settings(name: str) -> list[Setting]:
    """Return the arguments of a class, by its public name or path within ``fedlight``, with their docstring's texts."""
    node = _class(name)
    init = next(part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
    arguments = init.args.args[1:] + init.args.kwonlyargs
    # ast has defaults for the last positional arguments alone.
    missing = len(init.args.args) - 1 - len(init.args.defaults)
    defaults = [*[None] * missing, *init.args.defaults, *init.args.kw_defaults]
    texts = dict(_described(ast.get_docstring(node) or ""))
    return [
        Setting(
            argument.arg,
            None if value is None else _as_yaml(value),
            "" if argument.annotation is None else re.split(r"\W", ast.unparse(argument.annotation))[0],
            texts.get(argument.arg, ""),
        )
        for argument, value in zip(arguments, defaults, strict=True)
    ]


def summary(name: str) -> str:
    """Return the first line of a class's docstring."""
    return _first_sentence((ast.get_docstring(_class(name)) or "").partition("\n")[0])


def classes_in(folder: str) -> list[str]:
    """Return the classes of a folder that a config may name, public ones first."""
    return [name for name, file in CLASS_FILES.items() if file.startswith(f"{folder}.")]


@cache
def classes_of(base: str, folder: str = "federation") -> list[str]:
    """Return the classes of a folder that a config may name and that are derived from a class of it.

    Examples:
        >>> classes_of("Channel")
        ['Wire', 'Identity']
    """
    names = classes_in(folder)
    headers: dict[str, str] = {}
    # All files: bases are not all public.
    for file in sorted((Path(fedlight.__file__).parent / folder.replace(".", "/")).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        headers |= dict(re.findall(r"^class (\w+)\(([\w, ]*)", text, re.MULTILINE))
    derived = {base}
    # A class may come before its base, so one pass is not enough; a chain has at most all classes.
    for _ in headers:
        derived |= {name for name, bases in headers.items() if derived & set(bases.split(", "))}
    return [name for name in names if name in derived - {base}]


def _class(name: str) -> ast.ClassDef:
    file, _, last = name.rpartition(".")
    root = Path(fedlight.__file__).parent
    path = root.joinpath(*(file or CLASS_FILES[name]).split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(part for part in tree.body if isinstance(part, ast.ClassDef) and part.name == last)


def _described(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a docstring's arguments, each with its text."""
    section = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
    for names, text in re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {5,}.*)*)", section, re.MULTILINE):
        for name in names.split(", "):
            yield name, _first_sentence(" ".join(text.split()))


def _first_sentence(text: str) -> str:
    """Return a sentence for the terminal, with YAML's word for None.

    Examples:
        >>> _first_sentence("folder of `save`; see `fedlight.export`. None: the run's.")
        'folder of save'
        >>> _first_sentence("steps of a visit; None is one pass.")
        'steps of a visit; null is one pass'
    """
    sentence = re.split(r"\.(?: |$)|; see ", text)[0]
    return re.sub(r"\bNone\b", "null", sentence.replace("`", ""))


def _as_yaml(value: ast.expr) -> str:
    text = ast.unparse(value)
    return {"None": "null", "True": "true", "False": "false"}.get(text, text.strip("'"))


def _keys(part: str, name: str) -> dict[str, str]:
    """Return the keys of a class, each with its default, or with its name in capitals if it is required, and its text."""
    defaults = [(key, key.name.upper() if key.default is None else key.default) for key in settings(name)]
    return {f"--{part}.{key.name} {default}": key.about for key, default in defaults}


def _lines(entries: dict[str, str], short: bool = False) -> str:
    """Return keys and texts in two columns, as wide as the terminal, from 80 to 120 characters; ``short``: cut to a line."""
    column = min(max(map(len, entries)), 36) + 4
    width = min(max(shutil.get_terminal_size((120, 24)).columns, 80), 120)
    lines = []
    for key, about in entries.items():
        if short:
            about = textwrap.shorten(about, width - max(column, len(key) + 4), placeholder=" ...")
        elif len(key) + 4 > column:
            lines.append(f"  {key}")
            key = ""
        # Values such as bf16-mixed stay whole.
        wrapped = [about] if short else textwrap.wrap(about, width - column, break_on_hyphens=False)
        first, *more = wrapped or [""]
        lines.append(f"  {key:<{column - 2}}{first}".rstrip())
        lines += [" " * column + line for line in more]
    return "\n".join(lines)
