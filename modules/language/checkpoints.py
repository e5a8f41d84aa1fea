"""Adapters-only checkpoints: what is trained, and the description of the base that it belongs to."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedlight.modules.language import base_model
from fedlight.modules.language.adapter_folders import adapter_checksum
from fedlight.support.settings_record import described, refuse_other_settings

BASE_KEY = "base_model"
"""Key of the base's description in a Lightning checkpoint."""


def describe_base(
    network: nn.Module, new: list[str], model: str, base: str, merged: str | None
) -> dict[str, Any]:
    """What a checkpoint says of the base that it belongs to.

    Args:
        network: the base, without adapters.
        new: its parameters that are in no folder.
        model: hub name or folder.
        base: its number form.
        merged: folder of the adapter that is added to its weights, or None.
    """
    described = {"model": model, "base": base, "checksum": base_model.fingerprint(network, skip=new)}
    return described if merged is None else described | {"merged adapter": adapter_checksum(merged)}


def check_base(saved: Mapping[str, Any] | None, own: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that was made on another base.

    Args:
        saved: the description in the checkpoint; None where it has none.
        own: that of the module. ``model`` may differ: a model may move.

    Raises:
        ValueError: they differ.

    Example:
        >>> a = {"model": "x/a", "checksum": "1f"}
        >>> check_base(a, {"model": "/models/a", "checksum": "1f"})
        >>> check_base(a, {"model": "b", "checksum": "2e"})
        Traceback (most recent call last):
        ...
        ValueError: this checkpoint belongs to another model: made on 'x/a' (checksum 1f), here is 'b' (checksum 2e)
    """
    if saved is None:
        raise ValueError(
            "this checkpoint does not say which model it belongs to: it was not made by a fedlight module"
        )
    if {**saved, "model": ""} != {**own, "model": ""}:
        was, now = (
            f"{base.get('model')!r} ({', '.join(f'{key} {value}' for key, value in base.items() if key != 'model')})"
            for base in (saved, own)
        )
        raise ValueError(f"this checkpoint belongs to another model: made on {was}, here is {now}")


def check_optimizer_settings(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuses to go on with another optimizer: torch would silently keep the settings of the checkpoint.

    Raises:
        ValueError: a setting differs.

    Example:
        >>> check_optimizer_settings({"lr": 0.1, "model": "a"}, {"lr": 0.2, "model": "b"})
        Traceback (most recent call last):
        ...
        ValueError: the checkpoint was trained with lr=0.1 and goes on with it, not with lr=0.2: ...
    """
    names = ("lr", "optimizer", "optimizer_args", "lr_schedule")
    was, now = ({name: described(settings.get(name)) for name in names} for settings in (saved, own))
    refuse_other_settings(was, now, "start anew from its adapter by the setting adapter")


def check_state(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Refuses a state whose names or shapes are not exactly those of the module.

    Raises:
        ValueError: they are not.

    Example:
        >>> check_state({"a": torch.zeros(2)}, {"a": torch.zeros(3)})
        Traceback (most recent call last):
        ...
        ValueError: this checkpoint does not fit the module: a is (2,) in the checkpoint and (3,) here; set ...
    """
    wrong = [f"{name} is missing in the checkpoint" for name in own.keys() - saved.keys()]
    wrong += [f"{name} is not in the module" for name in saved.keys() - own.keys()]
    wrong += [
        f"{name} is {tuple(saved[name].shape)} in the checkpoint and {tuple(own[name].shape)} here"
        for name in own.keys() & saved.keys()
        if saved[name].shape != own[name].shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ValueError(
            f"this checkpoint does not fit the module: {min(wrong)}{more}; "
            "set num_adapters, lora_rank, lora_targets, adapter and head as they were"
        )


def copy_state(saved: Mapping[str, Tensor], own: Mapping[str, nn.Parameter]) -> None:
    """Writes a state into the parameters of a module.

    Raises:
        ValueError: see :func:`check_state`.
    """
    check_state(saved, own)
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(saved[name])
