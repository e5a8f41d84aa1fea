"""Checks of settings, made before any work."""

import difflib
from collections.abc import Iterable


def check_choice(setting: str, value: str, options: Iterable[str]) -> None:
    """Check that a value is among the options.

    Raises:
        ValueError: it is not; the error names options with similar names.

    Example:
        >>> check_choice("optimizer", "AdmaW", ["SGD", "Adam", "AdamW"])
        Traceback (most recent call last):
        ...
        ValueError: optimizer='AdmaW': did you mean 'AdamW' or 'Adam'?
        >>> check_choice("base", "fp4", ["plain", "int8", "nf4"])
        Traceback (most recent call last):
        ...
        ValueError: base='fp4': did you mean 'nf4'?
    """
    options = list(options)
    if value in options:
        return
    near = difflib.get_close_matches(value, options, n=2) or options[:8]
    raise ValueError(f"{setting}={value!r}: did you mean {' or '.join(map(repr, near))}?")


def check_range(setting: str, value: float, low: float, high: float, above_low: bool = False) -> None:
    """Check that a number is in ``[low, high]``, or in ``(low, high]`` with ``above_low``.

    Raises:
        ValueError: it is outside.

    Example:
        >>> check_range("lora_dropout", 5, 0, 1)
        Traceback (most recent call last):
        ...
        ValueError: lora_dropout=5 must be in [0, 1]
    """
    if not (low < value if above_low else low <= value) or value > high:
        raise ValueError(f"{setting}={value} must be in {'(' if above_low else '['}{low}, {high}]")


def check_precision(precision: str) -> None:
    """Check that ``trainer.precision`` keeps fp32 adapters in full precision.

    Raises:
        ValueError: it would round them.

    Example:
        >>> check_precision("bf16-mixed")
        >>> check_precision("bf16-true")
        Traceback (most recent call last):
        ...
        ValueError: trainer.precision='bf16-true' would round the adapter after every step: set model.dtype, which is
        the base's, to 'bf16' or 'fp16', and trainer.precision to '32-true' or to a '-mixed' one
    """
    if precision.endswith("-true") and not precision.startswith(("32", "64")):
        raise ValueError(
            f"trainer.precision={precision!r} would round the adapter after every step: set model.dtype, which is "
            "the base's, to 'bf16' or 'fp16', and trainer.precision to '32-true' or to a '-mixed' one"
        )


def refuse_below(least: int, owner: str = "", **settings: int | None) -> None:
    """Check that settings are at least ``least``; None is not checked.

    Args:
        least: smallest allowed value.
        owner: prefix of the names in an error, such as ``"federated."``.
        settings: name -> value.

    Raises:
        ValueError: a setting is too small.

    Example:
        >>> refuse_below(1, "federated.", local_steps=3, clients_per_round=None)
        >>> refuse_below(1, "federated.", local_steps=0)
        Traceback (most recent call last):
        ValueError: federated.local_steps=0 must be at least 1
    """
    for name, value in settings.items():
        if value is not None and value < least:
            raise ValueError(f"{owner}{name}={value} must be at least {least}")
