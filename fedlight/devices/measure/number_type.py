"""Number type of a base, named by a setting or found by measuring this machine for ``auto``."""

import functools
from typing import NamedTuple

import torch

from fedlight.devices import hardware
from fedlight.devices.measure.trial import Sizes, step_flops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NARROW = 256
"""Width of hidden states below which bf16 gains nothing on a CPU, so it is not measured."""
FASTER = 1.2
"""Speed of bf16 over fp32 from which it is chosen, so that noise decides nothing."""
MOST_MEASURED = 2048
"""Width beyond which the ratio changes no more, and a trial would take long."""


class NumberType(NamedTuple):
    """Number type of unquantized weights, and of products with NF4 weights.

    Attributes:
        name: ``fp32``, ``bf16`` or ``fp16``.
        reason: in words; empty where the setting names a type that is not slow.
    """

    name: str
    reason: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """Its type in torch."""
        return DTYPES[self.name]


def choose_dtype(setting: str, device: torch.device, width: int) -> NumberType:
    """Return the number type of a base.

    ``auto`` is bf16 on a GPU that computes in it and fp16 on an older one. On a CPU with instructions for bf16, training
    steps are timed in both types, and bf16 is taken where it is 1.2 times as fast. All other CPUs, and models narrower than
    256, have fp32.

    Args:
        setting: ``auto``, ``fp32``, ``bf16`` or ``fp16``.
        device: device of the base.
        width: width of its hidden states.

    Examples:
        >>> print(*choose_dtype("auto", torch.device("cpu"), 96))
        fp32 as for every narrow model on a CPU (dtype: auto)
        >>> choose_dtype("bf16", torch.device("cuda"), 4096)
        NumberType(name='bf16', reason='')
    """
    has_bf16 = device.type in ("cpu", "cuda") and hardware.computes_bf16(device)
    if setting == "bf16" and device.type == "cpu" and not has_bf16:
        return NumberType(
            "bf16", "as asked for, without instructions of this processor: many times slower than dtype: fp32"
        )
    if setting != "auto":
        return NumberType(setting)
    name, reason = _fastest(device, width, has_bf16)
    return NumberType(name, f"{reason} (dtype: auto)")


def _fastest(device: torch.device, width: int, has_bf16: bool) -> tuple[str, str]:
    if device.type == "cuda":
        if has_bf16:
            return "bf16", "in which this GPU computes"
        return "fp16", "as this GPU does not compute in bf16"
    if width < NARROW:
        return "fp32", "as for every narrow model on a CPU"
    if not has_bf16:
        return "fp32", f"as this {device.type.upper()} has no instructions for bf16"
    ratio = bf16_speed(width)
    if ratio < FASTER:
        return "fp32", f"as training steps in bf16 are {ratio:.1f} times as fast on this processor"
    return "bf16", f"in which training steps are {ratio:.1f} times as fast as in fp32 on this processor"


@functools.cache
def bf16_speed(width: int) -> float:
    """Return the speed of training steps in bf16 over those in fp32 on this processor, measured once in a second or two.

    The steps are those of one layer with LoRA of this width, up to 2048; the random stream stays as it is.
    """
    heads = max(1, min(width, MOST_MEASURED) // 64)  # 64 features a head
    sizes = Sizes(width=64 * heads, layers=1, heads=heads, words=1024, examples=2, tokens=96)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        slow, fast = (step_flops(sizes, DTYPES[name], torch.device("cpu"), 0.5) for name in ("fp32", "bf16"))
    return fast / slow
