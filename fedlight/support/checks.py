"""Refusals of settings that cannot be meant, raised before any work is done."""

import difflib
from collections.abc import Iterable


def check_choice(setting: str, value: str, options: Iterable[str]) -> None:
    """Refuses a value that is not among the options, and says which is near.

    Raises:
        ValueError: it is not.

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
    """Refuses a number outside ``[low, high]``, or ``(low, high]`` with ``above_low``.

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
    """Refuses a ``trainer.precision`` that would turn fp32 adapters into half precision.

    Raises:
        ValueError: it would.

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
