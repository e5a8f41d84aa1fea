import itertools
from types import SimpleNamespace

import pytest
import torch

from fedlight.devices import BatchShape, CostMeter
from fedlight.devices.forecast import Workload
from fedlight.lightning_cli.cli import ReadSettings, find_config
from fedlight.modules.sft import SFTModule
from fedlight.preflight import memory
from fedlight.preflight.finding import State
from fedlight.preflight.machine import MachineMemory
from fedlight.stacking.fast_layers import use_fast_layers


def counted(*settings, name="sft.yaml"):
    arguments = ["fit", "--config", find_config(name), "--data.batch_size=4", "--data.max_tokens=64"]
    config = ReadSettings([*arguments, *settings]).config["fit"]
    return memory.count_training("train", config, "toy", {})


def test_the_peak_is_the_sum_of_its_parts():
    """Libraries with a tokenizer, the base in its number type, fp32 adapters, and activations in that number type."""
    found = counted()
    skeleton = SFTModule("toy").skeleton("fp32")
    use_fast_layers(skeleton.network, skeleton.dropout_masks)
    frozen, trained = (
        sum(weight.numel() for weight in skeleton.parameters() if weight.requires_grad is learns)
        for learns in (False, True)
    )
    words = skeleton.causal_lm.config.vocab_size
    activations = CostMeter(skeleton).cost(BatchShape(4, 64, 4 * 63)).activation_bytes
    parts = [530_000_000 + 1250 * words, 4 * frozen, (4 + 4 + 8) * trained, round(1.1 * activations)]
    resting = [found.process_bytes, found.at_rest.base_bytes, found.trained_bytes]
    assert [*resting, found.activation_bytes] == parts
    assert found.peak_bytes == sum(parts)


def test_a_base_in_16_bits_takes_half_and_its_activations_more_than_that():
    """Adapters, losses and softmax stay in fp32, so twice the activations in bf16 would be too many for fp32."""
    wide, narrow = counted(), counted("--model.dtype=bf16")
    assert wide.at_rest.base_bytes == 2 * narrow.at_rest.base_bytes
    assert narrow.activation_bytes < wide.activation_bytes < 1.6 * narrow.activation_bytes


def test_what_a_quantized_base_leaves_unquantized_is_in_the_number_type():
    bases = (), ("--model.base=nf4",), ("--model.base=nf4", "--model.dtype=bf16")
    plain, nf4, half = (counted(*base).at_rest.base_bytes for base in bases)
    rest = 2 * (nf4 - half)
    assert 0 < rest < nf4 < plain
    assert nf4 - rest == pytest.approx((plain - rest) / 4 * (0.5 + 4 / 64), rel=1e-3)


def test_gradient_checkpointing_is_in_the_forecast():
    less = counted("--model.execution.gradient_checkpointing=true")
    assert less.activation_bytes < 0.8 * counted().activation_bytes


def test_a_step_is_the_second_of_two_batches_and_grows_with_the_operations(monkeypatch):
    """Ticks of 1, 2, 3 ... seconds: the first batch takes 1 s, the second 3 s; timed are 4 of 8 texts of 256 tokens."""
    config = ReadSettings(["fit", "--config", find_config("sft.yaml")]).config["fit"]
    meter = CostMeter(SFTModule("toy").skeleton("fp32"))
    shape = BatchShape(8, 256, 8 * 255)
    ticks = itertools.accumulate([0.0, 1.0, 0.0, 3.0])
    monkeypatch.setattr(memory, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    # Torch warns before it forks the streams of both.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    work = Workload(meter, (), 8.0, shape, 1, 0, 0)
    assert memory.step_seconds(config, work) == pytest.approx(6.0, rel=1e-3)


def test_time_and_tokens_of_each_stage_are_said(monkeypatch):
    training = counted()
    training.steps.update(short=60, long=1200, pooled=None)
    monkeypatch.setattr(memory, "step_seconds", lambda config, work, cuda: 3.0)
    (found,) = memory.check_time([training])
    assert found.state is State.OK
    assert found.detail == (
        "3 seconds for a batch of 4 texts of 64 tokens, measured here; "
        "short: 60 batches with at most 15,360 tokens, at most 3 minutes without validation; "
        "long: 1,200 batches with at most 307,200 tokens, at most 1 hour without validation; "
        "pooled: as many batches as the data have"
    )


@pytest.mark.parametrize(("name", "texts"), [("dpo.yaml", 8), ("reward.yaml", 8), ("selector.yaml", 4)])
def test_a_pair_of_answers_is_two_texts(name, texts, monkeypatch):
    training = counted(name=name)
    training.steps.update(short=60)
    monkeypatch.setattr(memory, "step_seconds", lambda config, work, cuda: 3.0)
    (time,) = memory.check_time([training])
    here = MachineMemory(10**12, "this machine has 1 TB")
    assert f"for {texts} texts of 64 tokens" in memory.fits(training, here).detail
    assert f"a batch of {texts} texts of 64 tokens" in time.detail
    assert f"60 batches with at most {60 * texts * 64:,} tokens" in time.detail


def test_what_does_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(memory, "step_seconds", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(memory, "memory_of", lambda cuda: MachineMemory(10**6, "this machine has 1.0 MB"))
    assert memory.check_time([counted()]) == []


def test_a_gpu_that_others_fill_is_said(monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory, "step_seconds", fails)
    (found,) = memory.check_time([counted()])
    assert (found.state, found.detail) == (State.UNKNOWN, "CUDA out of memory")
