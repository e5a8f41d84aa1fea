"""Settings of a datamodule by their own names, as a test's helper takes them."""

from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any


def nested(kind: type, **settings: Any) -> dict[str, Any]:
    """Return settings in the dataclasses that the constructors of ``kind`` take."""
    made = {}
    for cls in kind.__mro__:
        for name, parameter in signature(cls.__init__).parameters.items():
            if is_dataclass(parameter.default) and name not in made:
                names = {field.name for field in fields(parameter.default)}
                given = {key: settings.pop(key) for key in names & {*settings}}
                made |= {name: type(parameter.default)(**given)} if given else {}
    return {**settings, **made}


def datamodule(kind: type, *given: Any, **settings: Any) -> Any:
    """Make a datamodule of settings by their own names."""
    return kind(*given, **nested(kind, **settings))
