"""One-line messages for errors of the command line's parser: the key, the given value, the expected one, the remedy.

jsonargparse reports for a wrong value why each of its possible types refuses it, once for every class around it: a tree of
indented text. The line is made of the innermost part.
"""

import inspect
import re
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from fedlight.conf import path as conf_path
from fedlight.further_names import FURTHER
from fedlight.lightning_cli.class_names import find_object, last_part
from fedlight.support.checks import classes_below
from fedlight.support.words import near

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "list": "a list",
    "Sequence": "a list",
    "dict": "a map",
}
"""Name of a type in the parser's messages -> its name for users."""
EXAMPLES = {int: "1", float: "1.0", bool: "true", str: "TEXT"}
OF_VALUE = {"optimizer": "name", "completions": "number", "split": "train_split"}
"""Setting that has others below it -> the one of these that a single value is meant for."""


def one_line(
    message: str, keys: Iterable[str] = (), dropped: Mapping[str, tuple[str, set[str]]] | None = None
) -> str:
    r"""Return the relevant part of a nested message of jsonargparse in one line, with its key.

    A misspelt key is looked up among ``keys``. ``dropped``: new class -> old class, and its dropped arguments.

    Examples:
        >>> one_line('Parser key "federated": Parser key "algorithm": - Expected a dot import path string: FedAvgg')
        "federated.algorithm: there is no class 'FedAvgg'; give its name if fedlight has it, else package.module.Name"
    """
    # The message repeats the key for each class around the value.
    key = ".".join(dict.fromkeys(re.findall(r'Parser key "([^"]+)"', message)))
    where = f"{key}: " if key else ""
    if match := re.search(r"unrecognized arguments: (.*)", message, re.S):
        given = " ".join(match[1].split())
        if not given.startswith("-"):
            config = given.removeprefix(f"{conf_path('')}/")  # as one of fedlight's own was named
            way = f"--config {config}" if given.endswith(".yaml") else "--trainer.max_epochs 3"
            return f"{config!r} is no key: keys start with two dashes, as in {way}"
        return _unknown_key([key, given.split()[0].partition("=")[0].lstrip("-")], sorted(keys))
    if match := re.search(r"(?:Group '([^']+)' )?does not accept option '([^']+)'", message):
        return _unknown_key([key, *match.groups()], sorted(keys))
    if match := re.search(r"arguments are required: ((\w+)\.\S+(?:, \S+)*)$", message):
        missing = " and ".join(sorted(match[1].replace(f"{match[2]}.", "").split(", ")))
        return (
            f"{match[2]} needs {missing}: give a config, as in fedlight {match[2]} --config selector.yaml, "
            f"or a class for each of them; its keys: fedlight {match[2]} --help"
        )
    of_class = r"(?:Problem with given class_path '([^']+)':\s+)?"
    if match := re.search(of_class + r"the following arguments are required: ([^\n]+)", message):
        names = match[2].split(", ")
        old, had = (dropped or {}).get(_last(match[1]), ("", set()))
        both = " and ".join(name for name in names if name in had)
        again = "is not carried over to another class: give it again, after the class"
        reason = _required(key, match[1], names, in_list="[list[" in message)
        return where + reason + (f"; what {old} was given as {both} {again}" if both else "")
    if match := re.search(of_class + r"Option '(\w[^']*)' is not accepted", message):
        said = message[: match.start()] if match[1] and _is_base(match[1], message[: match.start()]) else None
        return where + (_no_setting(match[1], match[2]) if said is None else _expected(said))
    unknown = r"(?:Expected a dot import path string|Not a valid subclass of [^:\n]*)[:.] *(\S+)"
    no_module = r"Problem with given class_path '([^']+)':\s+(?:No module named|module '\S+' has no)"
    if match := re.search(unknown, message) or re.search(no_module, message):
        return where + _no_class(match[1], message)
    if match := re.search(r"but (\S+) is abstract", message):
        names = _names(find_object(match[1]))
        return f"{where}{match[1].rpartition('.')[2]} stands for {' or '.join(names)}: name one first, --{key} {names[0]}"
    last = key.rpartition(".")[2]
    if last in OF_VALUE and (match := re.search(r"Unable to load config ['\"]([^'\"]*)", message)):
        return f"{where}it has settings below it: give --{key}.{OF_VALUE[last]}={match[1]}"
    return where + _expected(message)


def one_line_reference(key: str | None, message: str) -> str:
    r"""Return OmegaConf's message about a reference ``${...}`` in a config in one line, with the key after the command.

    Examples:
        >>> one_line_reference("fit.model.seed", "Interpolation key 'nope' not found\n    full_key: fit.model.seed")
        "model.seed: Interpolation key 'nope' not found; a reference is written as ${trainer.max_epochs}, ..."
    """
    where = f"{key.partition('.')[2]}: " if key and "." in key else ""
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", message.splitlines()[0]).strip('"')
    reason = re.sub(r" \(resolved to '[^']*'\)", "", reason)
    if "input" in reason:  # a message of OmegaConf's grammar, of no use to a user
        reason = "the reference in it cannot be read"
    return (
        f"{where}{reason}; a reference is written as ${{trainer.max_epochs}}, with a key that the config has "
        "and that does not refer back to this one"
    )


def refuse_no_settings(config: Mapping[str, Any]) -> None:
    """Raise ValueError for null as the settings of model or data, of which the parser cannot tell the key."""
    for name in ("model", "data"):
        given: Any = config.get(name)
        values = given.get("init_args") or {} if hasattr(given, "get") else {}
        # A class may hand arguments on to those that it is derived from.
        kinds = inspect.getmro(find_object(given["class_path"])) if values else ()
        hints = ChainMap(*map(_hints, kinds))
        for key, value in values.items():
            if value is None and is_dataclass(hints.get(key)):
                below = ", ".join(field.name for field in fields(hints[key]))
                raise ValueError(
                    f"{name}.{key}: null, and it has settings below it ({below}): leave it out, or set those"
                )


def _unknown_key(parts: list[str | None], keys: list[str]) -> str:
    key = ".".join(filter(None, parts))
    # Such as max_epochs for trainer.max_epochs.
    same_end = [known for known in keys if known.rpartition(".")[2] == key.rpartition(".")[2]]
    hint = f"; did you mean {same_end[0]!r}?" if same_end else near(key, keys)
    return f"there is no key {key!r}{hint or '; --help all lists all keys'}"


def _required(key: str, path: str | None, names: list[str], in_list: bool) -> str:
    hints = _hints(find_object(path or ""))
    examples = [(name, EXAMPLES.get(hints.get(name, type), name.upper())) for name in names]
    flags = " ".join(f"--{key}.{name} {value}" for name, value in examples)
    lines = f"init_args: {{{', '.join(f'{name}: {value}' for name, value in examples)}}}"
    return f"{_last(path)} needs {' and '.join(names)}, for example {lines if in_list else flags}"


def _last(path: str | None) -> str:
    return last_part(path) if path else "it"


def _hints(kind: Any) -> dict[str, Any]:
    try:
        return get_type_hints(kind.__init__)
    except (AttributeError, NameError, TypeError):  # NameError: an annotation for type checkers alone
        return {}


def _is_base(path: str, before: str) -> bool:
    """Return whether a message has tried a class derived from this one before, whose complaint is the right one."""
    base = find_object(path)
    tried = map(find_object, re.findall(r"Problem with given class_path '([^']+)'", before))
    return isinstance(base, type) and any(
        isinstance(kind, type) and kind is not base and issubclass(kind, base) for kind in tried
    )


def _no_setting(path: str | None, option: str) -> str:
    kinds = getattr(find_object(path or ""), "__mro__", ())
    known = dict.fromkeys(name for cls in kinds for name in inspect.signature(cls.__init__).parameters)
    settings = [name for name in known if name not in ("self", "args", "kwargs")]
    hints = {name: hint for cls in reversed(kinds) for name, hint in _hints(cls).items()}
    more = near_below(option, hints) or near(option, settings)
    has = f"; it has {', '.join(settings)}" if settings else ", and no other"
    return f"{_last(path)} has no setting {option!r}{more or has}"


def near_below(name: str, hints: Mapping[str, Any]) -> str:
    """Return ``"; did you mean 'x.name'?"`` for a setting that stands below one of those with these types, else "".

    Examples:
        >>> from fedlight.modules.language.adapters import Lora
        >>> near_below("lora_rank", {"lora": Lora | None}), near_below("rank", {"lora": int})
        ("; did you mean 'lora.rank'?", '')
    """
    kinds = ((key, kind) for key, hint in hints.items() for kind in (hint, *get_args(hint)))
    for key, kind in kinds:
        if isinstance(kind, type) and kind.__module__.startswith("fedlight."):
            for inner in inspect.signature(kind).parameters:
                if name in (inner, f"{key}_{inner}", f"{key.removesuffix('s')}_{inner}"):
                    return f"; did you mean '{key}.{inner}'?"
    return ""


def _no_class(name: str, message: str) -> str:
    if name.endswith((".yaml", ".yml")):
        return f"there is no file {name!r}: give the path of one that is there"
    if name.lower() in ("none", "false", "off", "no"):
        return f"{name} is no class; to leave it out write null"
    if name == f"fedlight.{last_part(name)}" and last_part(name) in FURTHER:
        return f"there is no {name!r}: write {last_part(name)}"
    # The last list is that of the innermost class.
    bases = re.findall(r"Subtypes: \[(?:list\[|<class ')([\w.]+)", message)[-1:]
    hint = near(name, [subclass for base in bases for subclass in _names(find_object(base))])
    return (
        f"there is no class {name!r}{hint or '; give its name if fedlight has it, else package.module.Name'}"
    )


def _names(base: Any) -> list[str]:
    """Return the names of the concrete classes that are derived from a class."""
    below = [*classes_below(base)] if isinstance(base, type) else []
    names = {cls.__name__ for cls in below if not inspect.isabstract(cls)}
    return sorted(name for name in names if not name.startswith("_")) or ["CLASS"]


def _expected(message: str) -> str:
    """Return the types that the value may have, and the value."""
    innermost = re.split(r'Parser key "[^"]+"[^:]*:', message)[-1]
    if match := re.search(r"Import path (\S+) does not \D* (\S+)", innermost):
        return f"{match[1]} is no {match[2]}"
    # The rest describes the classes around it.
    if match := re.match(r"\s*Expected .*?Got value: .*", innermost):
        innermost = match[0]
    given = re.search(r"Got value: (.*)|Given value: (.*)", innermost)
    kinds = _kinds(innermost)
    if kinds and given:
        value = given[1] or given[2]
        is_map = kinds == ["text"] and value.startswith("{")
        quote = "; a text with a colon in it is read as a map: write it into a config file" if is_map else ""
        return f"expected {' or '.join(kinds)}, given {value}{quote}"
    layers = ("NoneType", "Does not validate against any of the Union", "Expected a path but")
    lines = [line.strip() for line in innermost.splitlines() if not any(layer in line for layer in layers)]
    reasons = [line[line.index("Expected") :] for line in lines if "Expected" in line]
    reasons += [line[2:] for line in lines if line.startswith("- ")]
    return reasons[0] if reasons else " ".join(innermost.split())


def _kinds(text: str) -> list[str]:
    """Return the types that the parser expects by their names for users, such as ``a number`` or ``one of a, b, 3``."""
    types = re.findall(r"Expected an? <class ['\"](?:collections\.abc\.)?(\w+)['\"]>", text)
    kinds = [KINDS.get(name, name) for name in dict.fromkeys(types) if name != "NoneType"]
    if "float" in types and "int" in types:
        # "a number" includes whole ones.
        kinds.remove(KINDS["int"])
    classes = re.findall(r"Not a valid subclass of (\w+)", text)
    kinds += [f"a {name} (its class, or class_path and init_args)" for name in dict.fromkeys(classes)]
    listed = re.findall(r"Expected an? typing\.Literal\[([^\]]*)\]", text)
    choices = ", ".join(dict.fromkeys(", ".join(listed).replace("'", "").split(", ")))
    return kinds + ([f"one of {choices}"] if choices else [])
