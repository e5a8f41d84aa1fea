"""What emulating devices costs: rounds of a federation with a fleet against the same rounds without one.

The devices of the fleet have room for everything, in 16 bits, and are always there, so both runs train the same visits
on the same batches and end with the same weights, bit for bit, which is checked. The difference is the emulation itself:
it counts FLOPs and bytes of each new shape of a batch, and keeps the clock. A shape is counted once, so a longer run has
less of it. Measured twice, in CPU seconds, because other work on the machine disturbs these least: by the median ratio of
runs with and without a fleet, which take turns in one process; and by the time spent inside of the emulation as a part of
the rest of the same run, because on a busy machine equal runs differ by more than that ratio.

A second part measures the costs of a client's quantized base: making it, switching to it and back, a training step on it.
A real device would compute faster in 8 or 4 bits; on a CPU bitsandbytes unpacks the weights at each step.

Run: OMP_NUM_THREADS=1 python benchmarks/device_overhead.py [--rounds 8] [--pairs 8] [--json FILE]
"""

import argparse
import gc
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import lightning as L
import torch

from fedlight.callbacks.loop.devices import DeviceEmulation
from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.preferences.datamodule import PreferenceDataModule
from fedlight.datamodules.preferences.format import Format
from fedlight.devices.fleet import Fleet
from fedlight.devices.quantization import QuantizedBase
from fedlight.modules.language.adapters import Lora
from fedlight.modules.selector import SelectorModule

DEVICE = {
    "memory_gib": 1024,
    "tflops": 10,
    "download_mbps": 100,
    "upload_mbps": 50,
    "watts": 10,
    "weight_bits": 16,
}
SEED = 0


class RoundClock(L.Callback):
    """Seconds of each round, with the planning and loading between it and the next."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A round begins."""
        self.starts.append(time.process_time())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last round is over."""
        self.starts.append(time.process_time())

    @property
    def seconds(self) -> list[float]:
        """One number per round."""
        return [end - start for start, end in zip(self.starts, self.starts[1:], strict=False)]


def load_module(model: str) -> SelectorModule:
    """The selector of conf/selector.yaml, loaded, so that no measured time includes reading the model."""
    module = SelectorModule(model, lora=Lora(rank=8), lr=0.003, dtype="fp32", seed=SEED)
    module.configure_model()
    return module


def load_data(options: argparse.Namespace) -> PreferenceDataModule:
    """Votes of the embedded world."""
    return PreferenceDataModule(
        source=options.source,
        format=Format(choice_template="toy_choice", twins_together=True),
        tokenizer=options.model,
        max_tokens=128,
        batch_size=options.batch_size,
        seed=SEED,
    )


def run(options: argparse.Namespace, fleet: Fleet | None) -> dict[str, Any]:
    """One run: seconds in all, seconds of each round, and the trained weights."""
    module, data, clock = load_module(options.model), load_data(options), RoundClock()
    loop = FederatedLoop(
        clients_per_round=options.clients_per_round, local_steps=options.local_steps, seed=SEED, fleet=fleet
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=options.rounds,
            accelerator="cpu",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            callbacks=[loop, clock],
        )
        with time_inside(DeviceEmulation) as inside, without_collections():
            start = time.process_time()
            trainer.fit(module, datamodule=data)
            seconds = time.process_time() - start
    if any(record.get("reason") for record in loop.visit_records):
        raise RuntimeError("a device dropped out, so the two runs do not do the same")
    return {
        "seconds": seconds,
        "rounds": clock.seconds,
        "inside": sum(inside),
        "weights": module.state_dict(),
    }


@contextmanager
def without_collections() -> Iterator[None]:
    """Keeps Python's garbage collector, whose passes take longer the more a process holds, out of the timed part."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def time_inside(kind: type) -> Iterator[list[float]]:
    """Gives the CPU seconds of each call of a class's constructor and public methods from outside; one may call another."""
    seconds: list[float] = []
    under_way: list[str] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            if under_way:  # its time is part of the other's
                return method(*args, **options)
            under_way.append(method.__name__)
            start = time.process_time()
            try:
                return method(*args, **options)
            finally:
                seconds.append(time.process_time() - start)
                under_way.pop()

        return call

    methods = {
        name: value
        for name, value in vars(kind).items()
        if callable(value) and (name == "__init__" or name[0] != "_")
    }
    for name, method in methods.items():
        setattr(kind, name, timed(method))
    try:
        yield seconds
    finally:
        for name, method in methods.items():
            setattr(kind, name, method)


def compare(options: argparse.Namespace, fleet: Fleet) -> dict[str, float]:
    """Median seconds of a run and of a round without devices, and how much longer both take with them."""
    run(options, fleet)  # warms up: imports, allocator, the files of the data
    totals, rounds, pairs = [], [], []
    for number in range(options.pairs):
        order: list[Fleet | None] = [None, fleet] if number % 2 else [fleet, None]
        both = {one is not None: run(options, one) for one in order}
        plain, emulated = both[False], both[True]
        check_equal(plain["weights"], emulated["weights"])
        pairs.append((plain, emulated))
        totals.append(emulated["seconds"] / plain["seconds"])
        rounds.append(median_round(emulated) / median_round(plain))
    return {
        "run_seconds": statistics.median(plain["seconds"] for plain, _ in pairs),
        "round_seconds": statistics.median(median_round(plain) for plain, _ in pairs),
        "run_ratio": statistics.median(totals),
        "round_ratio": statistics.median(rounds),
        "inside_seconds": statistics.median(e["inside"] for _, e in pairs),
        "inside_ratio": statistics.median(e["seconds"] / (e["seconds"] - e["inside"]) for _, e in pairs),
    }


def median_round(result: dict[str, Any]) -> float:
    """Seconds of a round once it runs: the first one is left out if there are others."""
    return statistics.median(result["rounds"][1:] or result["rounds"])


def check_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Raises ``RuntimeError`` if emulation has changed the trained weights."""
    if not all(torch.equal(value, other[name]) for name, value in one.items()):
        raise RuntimeError("with devices on which everything fits, training has to be the same bit for bit")


def switch(options: argparse.Namespace) -> list[dict[str, float]]:
    """For 16, 8 and 4 bits: the first use, later ones, and a training step, whose ratio is to one with 16 bits."""
    module = load_module(options.model)
    base = QuantizedBase(module)
    ids = torch.randint(5, 50, (options.batch_size, 64), generator=torch.Generator().manual_seed(SEED))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(len(ids)).long()}
    first, switches, steps = {}, {16: [], 8: [], 4: []}, {16: [], 8: [], 4: []}
    for number in range(options.steps + 1):
        for bits in (16, 8, 4):
            start = time.perf_counter()
            base.use(bits)
            switched = time.perf_counter()
            module.zero_grad()
            module.example_losses(batch).mean().backward()
            done = time.perf_counter()
            if number == 0:
                first[bits] = switched - start
                continue
            switches[bits].append(switched - start)
            steps[bits].append(done - switched)
    return [
        {
            "bits": bits,
            "first_seconds": first[bits],
            "switch_microseconds": 1e6 * statistics.median(switches[bits]),
            "step_seconds": statistics.median(steps[bits]),
            "step_ratio": statistics.median(a / b for a, b in zip(steps[bits], steps[16], strict=True)),
        }
        for bits in (16, 8, 4)
    ]


def main(args: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="toy")
    parser.add_argument("--source", default="toy:votes")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=8, help="runs with and without devices")
    parser.add_argument("--clients-per-round", type=int, default=4)
    parser.add_argument("--local-steps", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10, help="of a base of each precision")
    parser.add_argument("--json", type=Path, help="writes the figures there")
    options = parser.parse_args(args)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "roomy.yaml"
        file.write_text("".join(f"{name}: {value}\n" for name, value in DEVICE.items()))
        emulation = compare(options, Fleet({str(file): 1.0}))
    print(
        f"{options.rounds} rounds of {options.clients_per_round} clients x {options.local_steps} steps, batch "
        f"{options.batch_size}, {torch.get_num_threads()} threads, median of {options.pairs} pairs of runs"
    )
    print("           CPU seconds without devices   with / without")
    print(f"  run      {emulation['run_seconds']:27.2f}   {emulation['run_ratio']:.3f}")
    print(f"  round    {emulation['round_seconds']:27.3f}   {emulation['round_ratio']:.3f}")
    print(
        f"  inside of emulation {emulation['inside_seconds']:.2f} s of a run, which is {emulation['inside_ratio']:.3f}"
    )
    quantized = switch(options)
    print("a client's base\n  bits   first use, s   switch, us   step, s   step / plain")
    for row in quantized:
        print(
            f"  {row['bits']:4d}   {row['first_seconds']:12.3f}   {row['switch_microseconds']:10.0f}   "
            f"{row['step_seconds']:7.4f}   {row['step_ratio']:.2f}"
        )
    if options.json:
        options.json.write_text(json.dumps({"emulation": emulation, "base": quantized}, indent=2) + "\n")


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    main()
