"""Checks of settings, made before any work."""

import difflib
from collections.abc import Iterable


def check_choice(setting: str, value: str, options: Iterable[str]) -> None:
    """Raise ValueError for a value that is not among the options, with similar options.

    Examples:
        >>> check_choice("optimizer", "AdmaW", ["SGD", "Adam", "AdamW"])
        Traceback (most recent call last):
        ValueError: optimizer='AdmaW': did you mean 'AdamW' or 'Adam'?
    """
    options = list(options)
    if value in options:
        return
    near = difflib.get_close_matches(value, options, n=2) or options[:8]
    raise ValueError(f"{setting}={value!r}: did you mean {' or '.join(map(repr, near))}?")


def check_range(setting: str, value: float, low: float, high: float, above_low: bool = False) -> None:
    """Raise ValueError for a number outside of ``[low, high]``, or of ``(low, high]`` with ``above_low``.

    Examples:
        >>> check_range("lora_dropout", 5, 0, 1)
        Traceback (most recent call last):
        ValueError: lora_dropout=5 must be in [0, 1]
    """
    if not (low < value if above_low else low <= value) or value > high:
        raise ValueError(f"{setting}={value} must be in {'(' if above_low else '['}{low}, {high}]")


def check_precision(precision: str) -> None:
    """Raise ValueError for a ``trainer.precision`` that would round fp32 adapters.

    Examples:
        >>> check_precision("bf16-mixed")
        >>> check_precision("bf16-true")
        Traceback (most recent call last):
        ValueError: trainer.precision='bf16-true' would round the adapter after every step: set model.dtype, which is...
    """
    if precision.endswith("-true") and not precision.startswith(("32", "64")):
        raise ValueError(
            f"trainer.precision={precision!r} would round the adapter after every step: set model.dtype, which is "
            "the base's, to 'bf16' or 'fp16', and trainer.precision to '32-true' or to a '-mixed' one"
        )


def refuse_below(least: int, owner: str = "", **settings: int | None) -> None:
    """Raise ValueError for a setting below ``least``; None is not checked, and ``owner`` is a prefix of the names.

    Examples:
        >>> refuse_below(1, "federated.", local_steps=3, clients_per_round=None)
        >>> refuse_below(1, "federated.", local_steps=0)
        Traceback (most recent call last):
        ValueError: federated.local_steps=0 must be at least 1
    """
    for name, value in settings.items():
        if value is not None and value < least:
            raise ValueError(f"{owner}{name}={value} must be at least {least}")
