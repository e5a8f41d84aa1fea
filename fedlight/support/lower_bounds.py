"""One clear line, before any work, where a number is too small."""


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
