"""A module and data that do not belong together are named at the first batch, in one line."""

from collections.abc import Mapping
from typing import Any


def refuse_other_batch(batch: Any, form: Mapping[str, int], who: str, reads: str) -> None:
    """Looks at which tensors a batch has, and of how many dimensions.

    Args:
        batch: of the datamodule.
        form: name of each entry that the module reads -> its dimensions; 0: not looked at.
        who: name of the module's class.
        reads: what the module reads, and which datamodule gives it.

    Raises:
        ValueError: an entry is missing or has other dimensions.

    Example:
        >>> refuse_other_batch({"labels": 0}, {"chosen": 0}, "DPOModule", "pairs")
        Traceback (most recent call last):
        ...
        ValueError: model=DPOModule reads pairs; the batches of this data have no 'chosen', only 'labels'
    """
    if not form:
        return
    where = f"model={who} reads {reads}; the batches of this data"
    if not isinstance(batch, Mapping):
        raise ValueError(f"{where} are of type {type(batch).__name__}")
    for name, dimensions in form.items():
        if name not in batch:
            raise ValueError(f"{where} have no {name!r}, only {', '.join(map(repr, batch))}")
        if dimensions and batch[name].dim() != dimensions:
            shape = tuple(batch[name].shape)
            raise ValueError(f"{where} have {name!r} of shape {shape}, not of {dimensions} dimension(s)")
