"""Adapters-only checkpoints: the trained weights, and the description of the base that they belong to."""

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedlight.support.settings_record import described, refuse_other_settings

BASE_KEY = "base_model"
"""Key of the base's description in a Lightning checkpoint."""
NUMBER_TYPE_KEY = "number_type"
"""Key of the number type of the base's unquantized weights."""


def fingerprint(network: nn.Module, skip: Collection[str]) -> str:
    """Return sixteen hex digits that identify a base, from names and up to 64 values of each unquantized weight.

    Quantized weights count by their name alone, because devices may round them differently; names in ``skip`` are left out.

    Examples:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> fingerprint(one, []) == fingerprint(one, []), fingerprint(one, []) == fingerprint(other, [])
        (True, False)
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in network.named_parameters():
        if name in skip:  # new weights are in no folder
            continue
        digest.update(name.encode())
        if weight.is_floating_point():
            # As bf16: a base loaded in bf16 and in fp32 has one fingerprint. As int16: numpy has no bf16.
            values = weight.detach().flatten()[:: max(1, weight.numel() // 64)][:64]
            digest.update(values.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def check_base(saved: Mapping[str, Any] | None, here: Mapping[str, Any]) -> None:
    """Raise ValueError for a checkpoint that was made on another base; ``model`` may differ, because a model may move.

    Examples:
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
    if {**saved, "model": ""} != {**here, "model": ""}:
        was, now = (
            f"{base.get('model')!r} ({', '.join(f'{key} {value}' for key, value in base.items() if key != 'model')})"
            for base in (saved, here)
        )
        raise ValueError(f"this checkpoint belongs to another model: made on {was}, here is {now}")


def check_optimizer_settings(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ValueError where optimizer settings differ: torch would silently keep those of the checkpoint.

    Examples:
        >>> check_optimizer_settings({"lr": 0.1, "model": "a"}, {"lr": 0.2, "model": "b"})
        Traceback (most recent call last):
        ...
        ValueError: the checkpoint was trained with lr=0.1 and goes on with it, not with lr=0.2: ...
    """
    names = ("lr", "optimizer")
    was, now = ({name: described(settings.get(name)) for name in names} for settings in (saved, here))
    refuse_other_settings(was, now, "start anew from its adapter by the setting adapter")


def copy_state(saved: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    """Copy a state into a module's parameters; raise ValueError where names or shapes differ.

    Examples:
        >>> copy_state({"a": torch.zeros(2)}, {"a": nn.Parameter(torch.zeros(3))})
        Traceback (most recent call last):
        ...
        ValueError: this checkpoint does not fit the module: a is (2,) in the checkpoint and (3,) here; set ...
    """
    wrong = [f"{name} is missing in the checkpoint" for name in parameters.keys() - saved.keys()]
    wrong += [f"{name} is not in the module" for name in saved.keys() - parameters.keys()]
    wrong += [
        f"{name} is {tuple(saved[name].shape)} in the checkpoint and {tuple(parameters[name].shape)} here"
        for name in parameters.keys() & saved.keys()
        if saved[name].shape != parameters[name].shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ValueError(
            f"this checkpoint does not fit the module: {min(wrong)}{more}; "
            "set num_adapters, lora, adapter and head as they were"
        )
    with torch.no_grad():
        for name, weight in parameters.items():
            weight.copy_(saved[name])
