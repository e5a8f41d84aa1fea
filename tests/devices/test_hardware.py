import ctypes
import os
import sys
from functools import partial

import pytest
import torch

from fedlight.augmentation.less.less import LESS
from fedlight.devices import hardware
from fedlight.generators.local_generator import LocalGenerator
from fedlight.judges.local_judge import LocalJudge
from fedlight.judges.selector_judge import SelectorJudge

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
X86, ARM = {"architecture": "x86_64", "avx512_f": True}, {"architecture": "aarch64", "neon": True}


@pytest.mark.parametrize(
    ("capabilities", "level", "expected"),
    [
        (X86, "AVX512", False),
        (X86 | {"avx512_bf16": True}, "AVX512", True),
        (X86 | {"amx_bf16": True}, "AVX512", True),
        (X86 | {"avx512_bf16": True}, "AVX2", False),  # has it, and is told not to use it
        (ARM | {"bf16": False}, "DEFAULT", False),
        (ARM | {"bf16": True}, "DEFAULT", True),
        (ARM | {"bf16": True}, "SVE256", True),
        ({}, "DEFAULT", False),
    ],
)
def test_a_processor_computes_in_bf16_or_not(monkeypatch, capabilities, level, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)
    assert hardware.computes_bf16(CPU) is expected


def test_an_older_torch_cannot_tell(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not hardware.computes_bf16(CPU)


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_gpu_is_asked_for_what_it_does_itself(monkeypatch, has_bf16):
    """Older ones emulate bf16, slowly."""
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16 or including_emulation
    )
    assert hardware.computes_bf16(CUDA) is has_bf16


@pytest.mark.parametrize(("has_cuda", "expected"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_the_gpu_where_there_is_one(monkeypatch, has_cuda, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert hardware.choose_device("auto") == hardware.choose_device() == torch.device(expected)
    assert hardware.choose_device("cpu") == CPU
    with pytest.raises(ValueError, match="device='gpu' is none of torch: set it to auto, cpu or cuda"):
        hardware.choose_device("gpu")
    if has_cuda:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert hardware.choose_device("cuda:1") == torch.device("cuda", 1)
        with pytest.raises(ValueError, match="device='cuda:9', but torch finds 2 here"):
            hardware.choose_device("cuda:9")


@pytest.mark.parametrize("kind", [LocalGenerator, LocalJudge, SelectorJudge, partial(LESS, number=1)])
def test_a_gpu_that_is_not_there_is_refused_by_whoever_is_told_to_take_it(monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device='cuda', but torch finds no GPU here"):
        kind(model="toy", device="cuda", **({"adapter": "none"} if kind is SelectorJudge else {}))


def test_freed_memory_is_given_back_by_glibc_alone(monkeypatch):
    trimmed = []

    class Library:
        def __init__(self, name):
            if sys.platform == "win32":
                raise TypeError("None is no library there")
            if sys.platform == "linux":
                self.malloc_trim = trimmed.append

    monkeypatch.setattr(ctypes, "CDLL", Library)
    for platform, calls in (("linux", [0]), ("darwin", [0]), ("win32", [0])):
        monkeypatch.setattr(sys, "platform", platform)
        hardware.return_freed_memory()
        assert trimmed == calls


def test_these_tests_see_no_gpu(request):
    """Whatever the machine has: else a command that says nothing of an accelerator would train there."""
    if "gpu" not in request.config.option.markexpr:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert not hardware.has_cuda()


def test_peak_memory_is_in_bytes_and_none_where_the_system_does_not_say(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(hardware, "has_cuda", lambda: True)  # a GPU says nothing of a run on the processor
    linux = hardware.peak_memory(cpu)
    assert linux > 50 * 2**20  # torch alone takes that
    monkeypatch.setattr(sys, "platform", "darwin")
    assert linux / 1024 <= hardware.peak_memory(cpu) < linux  # getrusage gives bytes there
    monkeypatch.setitem(sys.modules, "resource", None)
    assert hardware.peak_memory(cpu) is None
