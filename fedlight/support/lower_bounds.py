"""One clear line, before any work, where a number is too small."""


def refuse_below(least: int, owner: str = "", **settings: int | None) -> None:
    """Refuses settings that are smaller than they may be; None is none.

    Args:
        least: what each of them has to be at least.
        owner: whose they are, with a dot behind it: ``"federated."``.
        settings: name to value.

    Raises:
        ValueError: one is too small; it is named with its value.

    Example:
        >>> refuse_below(1, "federated.", local_steps=3, clients_per_round=None)
        >>> refuse_below(1, "federated.", local_steps=0)
        Traceback (most recent call last):
        ValueError: federated.local_steps=0 must be at least 1
    """
    for name, value in settings.items():
        if value is not None and value < least:
            raise ValueError(f"{owner}{name}={value} must be at least {least}")
