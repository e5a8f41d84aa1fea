import math
from dataclasses import replace

import pytest
from torch import nn

from fedlight.devices import BatchShape, Chance, Device, StepCost, Trace
from fedlight.devices.forecast import Remedy, Workload, forecast, remedies


class Meter:
    """A token takes 10 bytes of activations and 10^9 FLOPs; computed twice, half the bytes and half as many FLOPs more.

    In a forward pass alone it takes 2 bytes and 3 * 10^8 FLOPs.
    """

    checkpoints, together = True, 1
    module = nn.Sequential(nn.Linear(64, 64, bias=False).requires_grad_(False), nn.Linear(64, 1, bias=False))

    def cost(self, shape, checkpointing=False):
        tokens = shape.examples * shape.tokens
        if checkpointing:
            return StepCost(3 * tokens * 10**9 // 2, 5 * tokens)
        return StepCost(tokens * 10**9, 10 * tokens)

    def forward_cost(self, shape):
        tokens = shape.examples * shape.tokens
        return StepCost(3 * tokens * 10**8, 2 * tokens)


# At 16 bits the base takes 2 * 4096 bytes, at 8 bits 4096 + 4 * 64, at 4 bits 2048 + 4 * 64.
BASE = {16: 8192, 8: 4352, 4: 2304}
TRAINED = 64 * (4 + 4 + 8)
WORK = Workload(Meter(), {"1.weight"}, 8.0, BatchShape(8, 64), num_batches=3, bytes_down=1000, bytes_up=500)


def device(budget, bits=16, **changes):
    speeds = {"tflops": 1, "utilisation": 1, "download_mbps": 0.008, "upload_mbps": 0.008, "watts": 2}
    figures = {"memory_gib": budget / 2**30, "memory_share": 1, "weight_bits": bits}
    return Device("unit", **{**speeds, **figures, **changes})


def test_a_device_with_room_to_spare():
    found = forecast(device(10**6), WORK)
    assert found.reason == ""
    assert (found.fit.micro_batch, found.fit.checkpointing) == (8, False)
    assert found.fit.footprint.base_bytes == BASE[16]
    assert found.fit.footprint.peak_bytes == BASE[16] + TRAINED + 5120
    assert found.job.flops == 3 * 512 * 10**9
    assert found.job.phases == (1.0, pytest.approx(1.536), 0.5)  # a kilobyte a second
    assert found.joules == pytest.approx(2 * 3.036)
    assert found.rounds_per_day == pytest.approx(86400 / 3.036)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_one_byte_decides(bits):
    """The smallest way: one example at a time, computed twice."""
    least = BASE[bits] + TRAINED + 5 * 64
    enough = forecast(device(least, bits), WORK)
    assert (enough.reason, enough.fit.micro_batch, enough.fit.checkpointing) == ("", 1, True)
    assert enough.job.flops == 3 * 512 * 1.5e9
    short = forecast(device(least - 1, bits), WORK)
    assert (short.reason, short.fit.footprint.peak_bytes) == ("out_of_memory", least)
    assert (short.rounds_per_day, short.job.fits) == (0, False)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_forward_passes_alone_need_no_gradients_and_moments(bits):
    back, least = BASE[bits] + TRAINED + 5 * 64, BASE[bits] + 2 * 64 * 4 + 2 * 64
    auto = replace(WORK, train="auto", perturbations=3)
    assert forecast(device(back, bits), auto).fit.forward is False
    forward = forecast(device(back - 1, bits), auto)
    assert (forward.reason, forward.fit.forward, forward.fit.micro_batch) == ("", True, 4)
    assert forward.fit.footprint.peak_bytes == BASE[bits] + 2 * 64 * 4 + 2 * 256
    assert forward.job.flops == 2 * 3 * 3 * 512 * 3e8
    assert forecast(device(least, bits), auto).fit.micro_batch == 1
    short = forecast(device(least - 1, bits), auto)
    assert (short.reason, short.fit.footprint.peak_bytes) == ("out_of_memory", least)
    # Where the run does not ask for it, it is said that it would help.
    assert forecast(device(least, bits), WORK).reason == "out_of_memory"
    assert forecast(device(least, bits), WORK).forward_fits
    assert not forecast(device(least - 1, bits), WORK).forward_fits
    assert not forecast(device(back, bits), WORK).forward_fits


def test_late_and_never_there_for_long_enough():
    assert forecast(device(10**6), WORK, deadline_seconds=3.1).reason == ""
    assert forecast(device(10**6), WORK, deadline_seconds=3.0).reason == "late"
    minutes = Trace(((0, 3 / 3600), (1, 1 + 2 / 3600)), period_hours=24)
    assert forecast(device(10**6, availability=minutes), WORK).reason == "left"
    assert forecast(device(10**6, availability=Chance(0.0)), WORK).reason == "never"
    longer = Trace(((0, 8 / 3600), (1, 1 + 2 / 3600)), period_hours=24)
    found = forecast(device(10**6, availability=longer), WORK)
    assert (found.reason, found.rounds_per_day) == ("", 2)
    half = forecast(device(10**6, availability=Chance(0.5)), WORK)
    assert half.rounds_per_day == pytest.approx(43200 / 3.036)


def test_fewer_bits_or_shorter_texts_would_do():
    """As many bits as possible; texts are halved until they fit: 64 -> 32 -> 16, at 5 bytes a token."""
    assert remedies(device(BASE[8] + TRAINED + 320), WORK)[0] == Remedy(weight_bits=8, tokens=64)
    assert remedies(device(BASE[4] + TRAINED + 320), WORK) == [Remedy(weight_bits=4, tokens=64)]
    assert remedies(device(BASE[4] + TRAINED + 319, bits=8), WORK) == [Remedy(weight_bits=4, tokens=32)]
    for room, tokens in ((160, 32), (159, 16)):
        found = remedies(device(BASE[4] + TRAINED + room, bits=4), WORK)
        assert found == [Remedy(weight_bits=4, tokens=tokens)]
    assert remedies(device(BASE[4] + TRAINED + 79, bits=4), WORK) == []
    either = remedies(device(BASE[16] + TRAINED + 160), WORK)
    assert either == [Remedy(weight_bits=8, tokens=64), Remedy(weight_bits=16, tokens=32)]
    forward = remedies(device(BASE[8] + 2 * 64 * 4 + 2 * 64), replace(WORK, train="auto"))
    assert forward[0] == Remedy(weight_bits=8, tokens=64)


def test_what_is_said_to_help_helps():
    for budget in range(BASE[4] + TRAINED + 80, BASE[16] + TRAINED + 320, 97):
        short = device(budget)
        assert forecast(short, WORK).reason == "out_of_memory"
        for remedy in remedies(short, WORK):
            changed = replace(short, weight_bits=remedy.weight_bits)
            assert forecast(changed, WORK.shortened(remedy.tokens)).reason == ""
            if remedy.tokens < 64:
                assert forecast(changed, WORK.shortened(2 * remedy.tokens)).reason == "out_of_memory"
        assert remedies(short, WORK)


def test_shortened_texts_keep_their_share_of_labels():
    work = replace(WORK, shape=BatchShape(8, 65, 8 * 64))
    assert work.shortened(33).shape == BatchShape(8, 33, 8 * 32)
    for tokens in range(1, 65):  # never more than there are tokens with one before them
        assert work.shortened(tokens).shape.responses == 8 * (tokens - 1)
    assert replace(WORK, shape=BatchShape(8, 65, 100)).shortened(17).shape.responses == math.floor(100 / 4)
