"""Hardware of this machine, as opposed to the devices that it emulates.

Whether there is a GPU, and what it or the processor computes, is asked through these functions, so that a test can answer
it either way.
"""

import ctypes
import sys

import torch

TRIM_WEIGHTS = 4 * 2**20
"""Number of weights after which freed memory is given back, which takes 2 to 3 ms."""


def has_cuda() -> bool:
    """Return whether torch can use an NVIDIA GPU."""
    return torch.cuda.is_available()


def choose_device(device: str = "auto") -> torch.device:
    """Return the torch device of a setting: ``auto`` for the GPU where there is one, or a name of torch.

    Raises:
        ValueError: torch has no such device, or no such GPU here.
    """
    if device == "auto":
        return torch.device("cuda" if has_cuda() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={device!r} is none of torch: set it to auto, cpu or cuda") from None
    if chosen.type == "cuda" and not has_cuda():
        raise ValueError(f"device={device!r}, but torch finds no GPU here: set it to auto or cpu")
    if chosen.type == "cuda" and chosen.index and chosen.index >= torch.cuda.device_count():
        raise ValueError(
            f"device={device!r}, but torch finds {torch.cuda.device_count()} here, from cuda:0 on: set it to one of these"
        )
    return chosen


def computes_bf16(device: torch.device) -> bool:
    """Return whether a device has instructions for products in bf16; without them fp32 is computed and rounded, slowly.

    A processor counts as without them if torch cannot tell or does not use them.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):  # torch before 2.11
        return False
    has = torch.cpu.get_capabilities()
    # Torch does not use them, as with ATEN_CPU_CAPABILITY=avx2 in the environment.
    if has.get("architecture") == "x86_64" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return any(has.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))  # the last: 64-bit Arm


def peak_memory(device: torch.device, reserved: bool = False) -> int | None:
    """Return the most bytes of a GPU, or of main memory, that this process occupied so far; None where it is not known.

    Of a GPU with ``reserved`` also bytes that torch keeps for later tensors.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) if reserved else torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class FreedMemory:
    """Count of weights whose temporary copies were freed, which go back to the system after every `TRIM_WEIGHTS`."""

    def __init__(self) -> None:
        self._weights = 0

    def add(self, weights: int) -> None:
        """Count weights that were read or quantized."""
        self._weights += weights
        if self._weights > TRIM_WEIGHTS:
            self._weights = 0
            return_freed_memory()


def return_freed_memory() -> None:
    """Give memory that was freed back to the system; without glibc, whose ``malloc`` keeps it, do nothing."""
    if sys.platform != "win32" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
