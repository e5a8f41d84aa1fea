"""A GPU for machines that have none: tensors on ``cuda``, whose operators run the CPU's kernels on ordinary memory.

As on a real one, tensors of both devices in one operator and a generator of the other device are errors, and random
numbers come from a stream of its own. What it cannot show is time, rounding, NCCL and kernels of other packages.

Imported before torch, it adds ``simulated_gpu.cpp`` to the CPU build of torch; as a plugin of pytest it moves every Trainer
that asks for the CPU to this GPU: ``make simulated-gpu``.
"""

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

MEMORY = 16 << 30  # bytes that it says to have


def _load() -> None:
    """Compile the kernels, once for each version of torch, and load them before torch looks for a GPU."""
    assert "torch" not in sys.modules, "import simulated_gpu before torch"
    torch = Path(importlib.util.find_spec("torch").origin).parent
    source = Path(__file__).with_suffix(".cpp")
    library = source.parents[2] / f"build/{source.stem}-{(torch / 'version.py').stat().st_mtime_ns}.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        library.parent.mkdir(exist_ok=True)
        folders = [f"-isystem{torch}/include", f"-isystem{torch}/include/torch/csrc/api/include"]
        compiler = ["c++", "-shared", "-fPIC", "-std=c++20", "-O1", "-w", *folders, str(source)]
        subprocess.run([*compiler, "-o", str(library)], check=True)
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
        ctypes.CDLL(str(torch / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


_load()

import bitsandbytes  # noqa: E402, F401  # while torch says that there is no GPU: its kernels for one are not here
import pytest  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.trainer.connectors import accelerator_connector  # noqa: E402

_ops = torch.ops.simulated_gpu
_stream = _ops.stream()


class _Device:
    """As ``torch.cuda.device``; there is one."""

    def __init__(self, device: object) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: object) -> None:
        pass


CUDA = {
    "_lazy_init": lambda: None,
    "_is_in_bad_fork": _ops.is_forked,
    "is_available": lambda: True,
    "is_initialized": lambda: not _ops.is_forked(),
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "device": _Device,
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "get_device_name": lambda device=None: "simulated GPU",
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: SimpleNamespace(
        name="simulated GPU", total_memory=MEMORY, major=9, minor=0, multi_processor_count=1
    ),
    "is_bf16_supported": lambda including_emulation=True: True,
    "mem_get_info": lambda device=None: (MEMORY - _ops.bytes(), MEMORY),
    "memory_stats": lambda device=None: {},
    "memory_allocated": lambda device=None: _ops.bytes(),
    "memory_reserved": lambda device=None: _ops.bytes(),
    "max_memory_allocated": lambda device=None: _ops.peak(),
    "max_memory_reserved": lambda device=None: _ops.peak(),
    "reset_peak_memory_stats": lambda device=None: _ops.reset_peak(),
    "default_generators": (_stream,),
}
STREAM = {
    "manual_seed": lambda seed: _stream.manual_seed(int(seed)),
    "manual_seed_all": lambda seed: _stream.manual_seed(int(seed)),
    "initial_seed": _stream.initial_seed,
    "get_rng_state": lambda device="cuda": _stream.get_state(),
    "set_rng_state": lambda state, device="cuda": _stream.set_state(state),
    "get_rng_state_all": lambda: [_stream.get_state()],
    "set_rng_state_all": lambda states: [_stream.set_state(state) for state in states],
}


def _moved(storage, device):
    """A copy of a storage on a device."""
    return (
        torch.empty(0, dtype=torch.uint8, device=storage.device)
        .set_(storage)
        .to(device, copy=True)
        .untyped_storage()
    )


STORAGE = {
    "clone": lambda self: _moved(self, self.device),
    "cuda": lambda self, device=None, non_blocking=False: self.to(device="cuda"),
    "to": lambda self, *, device, non_blocking=False: (
        self if torch.device(device).type == self.device.type else _moved(self, device)
    ),
}
for _place, _names in (
    (torch.cuda, CUDA | STREAM),
    (torch.cuda.random, STREAM),
    (torch.storage._StorageBase, STORAGE),
):
    for _name, _value in _names.items():
        setattr(_place, _name, _value)
torch._C._cuda_isCurrentStreamCapturing = lambda: False
_worker_loop = torch.utils.data._utils.worker._worker_loop


def _without_gpu(*args: object) -> None:
    """A loader's worker, forked from the process that trains: it cannot use the GPU."""
    _ops.fork()
    _worker_loop(*args)


torch.utils.data._utils.worker._worker_loop = _without_gpu


def _on_gpu(init):
    def moved(self, *args, **kwargs):
        if kwargs.get("accelerator") in ("cpu", "auto"):
            kwargs["accelerator"] = "gpu"
            if kwargs.get("devices") == "auto":
                kwargs["devices"] = 1
        init(self, *args, **kwargs)

    return moved


def pytest_configure() -> None:
    """Trains on the GPU what asks for the CPU."""
    connector = accelerator_connector._AcceleratorConnector
    connector.__init__ = _on_gpu(connector.__init__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests that simulated_gpu.txt names."""
    named = set(Path(__file__).with_suffix(".txt").read_text().splitlines())
    for item in items:
        if not named.isdisjoint((item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0])):
            item.add_marker(pytest.mark.skip(reason="not on the simulated GPU"))


def pytest_collection_finish() -> None:
    """Lets ``dtype: auto`` be fp32 for tiny models, as on the CPU: tests compare with computations in it."""
    from fedlight.devices.measure import number_type

    fastest = number_type._fastest
    cpu = torch.device("cpu")
    number_type._fastest = lambda device, width, has_bf16: fastest(
        cpu if width < number_type.NARROW else device, width, has_bf16
    )
