"""Rows: precision, accelerators, strategies, loggers, profilers, plugins."""

import csv
from functools import partial

import pytest
import torch
from lightning.pytorch import accelerators, loggers, plugins, profilers, strategies
from matrix import Equals, Refused, Row, Works, kind
from probes import Lines, same
from project import Project, Run, given
from reference import local_training

precision = kind("Precision")
accelerator = kind("Accelerators")
strategy = kind("Strategies")
logger = kind("Loggers")
profiler = kind("Profilers")
plugin = kind("Plugins")

BF16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def in_fp64(model, batches, round_idx):
    """A visit in 64 bits, from parameters of 32 and back to them."""
    model.double()
    content = [type(batch)([part.double() for part in batch.content], batch.random) for batch in batches]
    local_training(model, content, round_idx)
    model.float()


class OwnPrecision(plugins.Precision):
    """Counts the forward contexts."""


class OwnAccelerator(accelerators.CPUAccelerator):
    """One's own."""


class OwnStrategy(strategies.SingleDeviceStrategy):
    def __init__(self):
        super().__init__("cpu")


def in_pieces(kind):
    """A strategy of this kind that was never set up, in the place of the trainer's own: it asks for GPUs."""

    def put(trainer):
        trainer._accelerator_connector.strategy = object.__new__(kind)

    return Project(prepare=put)


def keeps_what_it_is_given(kind):
    """A logger of this kind whose service is not asked."""

    def check(folder):
        lines = type(kind.__name__, (Lines, kind), {})()
        Run(given(logger=lines), folder).fit()
        assert [step for step, _ in lines.of("fed/loss")] == [5, 11]

    return check


def csv_has_a_row_for_each_round(folder):
    """one row for each round, at the round's last step"""
    run = Run(given(logger=loggers.CSVLogger(folder)), folder).fit()
    with open(f"{run.trainer.logger.log_dir}/metrics.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["fed/loss"]]
    found = [(row["epoch"], row["step"], row["fed/clients"]) for row in rows]
    assert found == [("0", "5", "2.0"), ("1", "11", "2.0")]


def tensorboard_has_an_event_for_each_round(folder):
    """one point for each round, at the round's last step"""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Run(given(logger=loggers.TensorBoardLogger(folder)), folder).fit()
    events = EventAccumulator(run.trainer.logger.log_dir)
    events.Reload()
    assert [event.step for event in events.Scalars("fed/loss")] == [5, 11]


def every_training_batch_is_timed(folder):
    """an epoch is a round, a training batch that of a client"""
    times = profilers.SimpleProfiler()
    Run(given(profiler=times), folder).fit()
    assert len(times.recorded_durations["run_training_batch"]) == 12
    assert len(times.recorded_durations["run_training_epoch"]) == 2


def every_training_batch_is_profiled(folder):
    """an epoch is a round, a training batch that of a client"""
    calls = profilers.AdvancedProfiler(dirpath=folder, filename="calls")
    Run(given(profiler=calls), folder).fit()
    (text,) = [file.read_text() for file in folder.glob("fit-calls.txt")]
    assert "run_training_batch" in text


def operations_are_profiled(folder):
    """training is the same, bit for bit"""
    operations = profilers.PyTorchProfiler(dirpath=folder, filename="operations", schedule=None)
    run = Run(given(profiler=operations), folder).fit()
    assert same(run.weights(), Run(Project(), folder).fit().weights())
    (text,) = [file.read_text() for file in folder.glob("fit-operations*.txt")]
    assert "Optimizer.step#SGD.step" in text


def a_profiler_of_ones_own_hears_of_all(folder):
    """hears of the batches of all clients"""

    class Counting(profilers.Profiler):
        started = 0

        def start(self, action_name):
            self.started += action_name == "run_training_batch"

        def stop(self, action_name):
            pass

    counting = Counting()
    Run(given(profiler=counting), folder).fit()
    assert counting.started == 12


def checkpoints_are_written_behind(folder):
    """a checkpoint is a finished round with the global model"""
    trainer = {"enable_checkpointing": True, "plugins": plugins.AsyncCheckpointIO()}
    run = Run(Project(trainer=trainer), folder).fit()
    (found,) = folder.rglob("*.ckpt")
    assert same(torch.load(found, weights_only=True)["state_dict"], run.weights())


def a_checkpoint_io_of_ones_own(folder):
    """gets the checkpoint of a finished round"""

    class Kept(plugins.CheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            self.saved = checkpoint

        def load_checkpoint(self, path, map_location=None, weights_only=None):
            raise NotImplementedError

        def remove_checkpoint(self, path):
            pass

    kept = Kept()
    run = Run(Project(trainer={"enable_checkpointing": True, "plugins": kept}), folder).fit()
    assert same(kept.saved["state_dict"], run.weights())


def where_it_is(kind, name):
    """On a machine that has it the loop written out, within rounding; on others Lightning refuses."""

    def check(folder):
        project = given(accelerator=name)
        if kind.is_available():
            Equals(project, on_device, tolerance=1e-5).check(folder)
        else:
            Refused(project, "", "available").check(folder)

    return Works(check)


def on_device(model, batches, round_idx):
    """A visit on the CPU, from batches of another device."""
    content = [type(batch)([part.cpu() for part in batch.content], batch.random) for batch in batches]
    local_training(model, content, round_idx)


def without_package(package, **trainer):
    """Lightning's own refusal; ``trainer`` has functions."""
    project = Project(trainer=lambda: {name: made() for name, made in trainer.items()})
    return Refused(project, f"'{package}", "pip install", missing=package)


class NotHere(profilers.XLAProfiler):
    _stage = _output_file = None


class Averaging(plugins.LayerSync):
    def apply(self, model):
        return model

    def revert(self, model):
        return model


ROWS: list[Row] = [
    precision.equals('precision="32-true"', given(plugins=OwnPrecision()), covers="Precision"),
    precision.equals(
        'precision="64-true"',
        Project(trainer={"precision": "64-true"}),
        in_fp64,
        means="visits are computed in 64 bits; what is sent, and kept between rounds, has 32",
        tolerance=1e-7,
        covers="DoublePrecision",
    ),
    precision.equals(
        'precision="bf16-mixed"',
        given(precision="bf16-mixed"),
        partial(local_training, forward=BF16),
        means="the global model stays fp32",
        covers="MixedPrecision",
    ),
    precision.equals(
        'precision="16-mixed"',
        Project(
            trainer={"precision": "16-mixed"},
            warns=("You passed `Trainer\\(accelerator='cpu', precision='16-mixed'",),
        ),
        partial(local_training, forward=BF16),
        means="on a CPU Lightning takes bf16-mixed for it",
    ),
    precision.refused(
        'precision="bf16-true", "16-true"',
        given(precision="bf16-true"),
        "trainer.precision is 'bf16-true'",
        "'bf16-mixed' and '16-mixed' compute in 16 bits",
        covers="HalfPrecision",
    ),
    accelerator.equals("CPUAccelerator", given(accelerator="cpu")),
    accelerator.equals(
        "an Accelerator of one's own", given(accelerator=OwnAccelerator()), covers="Accelerator"
    ),
    *(
        accelerator(
            kind.__name__,
            where_it_is(kind, name),
            "one device: the loop written out on the CPU, within 1e-5; where there is none, Lightning refuses",
        )
        for kind, name in ((accelerators.CUDAAccelerator, "cuda"), (accelerators.MPSAccelerator, "mps"))
    ),
    accelerator(
        "XLAAccelerator", without_package("torch_xla", accelerator=lambda: "tpu"), "never tried with TPUs"
    ),
    strategy.equals("SingleDeviceStrategy", given(strategy=strategies.SingleDeviceStrategy("cpu"))),
    strategy.equals(
        "a Strategy of one's own, on one device", given(strategy=OwnStrategy()), covers="Strategy"
    ),
    strategy.refused(
        "DDPStrategy and others over several devices",
        given(strategy=strategies.DDPStrategy(), devices=2),
        "trainer.devices=2 and trainer.num_nodes=1 make 2 processes",
        "set --trainer.devices 1 --trainer.num_nodes 1",
        call=Run.ask,
        covers="ParallelStrategy",
    ),
    *(
        strategy.refused(
            name,
            in_pieces(getattr(strategies, name)),
            f"trainer.strategy={name}",
            "leave trainer.strategy out and set devices=1",
            call=Run.ask,
        )
        for name in ("DDPStrategy", "FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
    ),
    profiler("XLAProfiler", without_package("torch_xla", profiler=NotHere), "never tried with TPUs"),
    plugin.equals("a LayerSync of one's own", given(plugins=Averaging()), covers="LayerSync"),
    plugin(
        "XLACheckpointIO, XLAPrecision",
        without_package("torch_xla", plugins=plugins.XLACheckpointIO),
        "never tried with TPUs",
        covers="XLACheckpointIO XLAPrecision",
    ),
    *(
        plugin.refused(
            name,
            given(plugins=getattr(plugins, name)("32-true")),
            f"trainer.precision={name}",
            "leave trainer.precision out and set devices=1",
        )
        for name in ("DeepSpeedPrecision", "FSDPPrecision")
    ),
    plugin(
        "TransformerEnginePrecision",
        without_package(
            "transformer_engine",
            plugins=lambda: plugins.TransformerEnginePrecision(weights_dtype=torch.float32),
        ),
        "never tried with the package",
    ),
    plugin.refused(
        "BitsandbytesPrecision",
        Project(trainer=lambda: {"plugins": plugins.BitsandbytesPrecision("nf4")}),
        "Bitsandbytes is only supported",
        "on CUDA GPUs",
        means="fedlight's own language models have quantized bases on a CPU as well",
        missing="cuda",
    ),
    logger("CSVLogger", Works(csv_has_a_row_for_each_round)),
    logger("TensorBoardLogger", Works(tensorboard_has_an_event_for_each_round)),
    logger(
        "a Logger of one's own",
        Works(keeps_what_it_is_given(loggers.Logger)),
        "metrics of a round come once, at its last step",
        covers="Logger",
    ),
    *(
        logger(
            name,
            Works(keeps_what_it_is_given(getattr(loggers, name))),
            "gets a round's metrics once, at its last step; its service is not asked in the tests",
        )
        for name in ("WandbLogger", "MLFlowLogger", "CometLogger", "LitLogger")
    ),
    profiler("SimpleProfiler", Works(every_training_batch_is_timed)),
    profiler("AdvancedProfiler", Works(every_training_batch_is_profiled)),
    profiler("PyTorchProfiler", Works(operations_are_profiled)),
    profiler.equals("PassThroughProfiler", given(profiler=profilers.PassThroughProfiler())),
    profiler("a Profiler of one's own", Works(a_profiler_of_ones_own_hears_of_all), covers="Profiler"),
    plugin("AsyncCheckpointIO", Works(checkpoints_are_written_behind)),
    plugin.equals("TorchCheckpointIO", Project(trainer={"plugins": plugins.TorchCheckpointIO()})),
    plugin("a CheckpointIO of one's own", Works(a_checkpoint_io_of_ones_own), covers="CheckpointIO"),
    plugin.equals(
        "TorchSyncBatchNorm",
        given(plugins=plugins.TorchSyncBatchNorm()),
        means="one process: nothing to synchronize",
    ),
]
