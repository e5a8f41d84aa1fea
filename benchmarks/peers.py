"""Client visits a second of fedlight and its peers: one workload, all ways of training it by turns in one run.

A Llama of a million parameters with random weights, or the language model in the folder ``--model``, and LoRA of rank 8 on
all linear layers; 10 clients with 4 steps each in a round, no dropout, AdamW, fp32 or a base in bf16, random texts of equal
length. Every way runs in separate processes, which train one round each by turns, so that a noisy machine disturbs all
alike. By default a process has two threads of torch; two processes, and the one that they are compared with, have one
thread each.

* visits: median client visits a second of a way's rounds.
* ratio: median over the rounds of a way's speed to that of its reference in the same turn; low and high are its extremes.

pfl-research and Flower run in separate environments, where these, torch, transformers and peft can be imported:
``--pfl``, ``--flower`` name a Python there. A way that this machine or this version cannot run is left out, with one line.

Run: python benchmarks/peers.py [--rounds 5] [--pfl PYTHON] [--flower PYTHON] [--only WAY ...] [--json FILE]
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers_ways import Settings
from shown_rows import show

SIZES = [[2, 16], [4, 32], [8, 64]]
HAND = "by hand"
REFERENCES = {
    HAND: HAND,
    "lightning": HAND,
    "own": HAND,
    "sft": HAND,
    "by hand, full": "by hand, full",
    "own, full": "by hand, full",
    "own, stacked": "own",
    "sft, stacked": "sft",
    "own, one thread": "own, one thread",
    "own, two processes": "own, one thread",
    "own, two processes, stacked": "own, one thread",
    "sft, two processes, stacked": "own, one thread",
    "pfl": HAND,
    "flower": HAND,
}
"""Way -> the way that it is compared with."""
FURTHER = [
    ("own, stacked", "pfl"),
    ("own, two processes, stacked", "pfl"),
    ("own, two processes, stacked", "own"),
    ("sft, stacked", "pfl"),
    ("sft, two processes, stacked", "pfl"),
]
"""Further comparisons, each a row of its own."""
ONE_THREAD = ("own, one thread", *(name for name in REFERENCES if "two processes" in name))
PATIENCE_SECONDS = 600
"""Longest wait for a round, or for the processes of a way to be there."""
WAYS = Path(__file__).with_name("peers_ways.py")


class Ended(Exception):
    """Processes of a way have ended, which says how."""


class Way:
    """Processes of one way, which train a round together when they are told to.

    Args:
        name: of the way.
        python: that runs it.
        settings: of the workload.
        threads: of each process.
        log: folder for the processes' output besides their seconds.
        script: program of the processes.
    """

    def __init__(
        self, name: str, python: str, settings: Settings, threads: int, log: Path, script: Path = WAYS
    ) -> None:
        processes = 2 if "two processes" in name else 1
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        environment |= {"PEERS_PROCESSES": str(processes), "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
        if processes > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        self._log = log / f"{name}.txt"
        self._processes = []
        for rank in range(processes):
            own = environment | ({"LOCAL_RANK": str(rank), "NODE_RANK": "0"} if processes > 1 else {})
            with self._log.open("a") as errors:
                self._processes.append(
                    subprocess.Popen(
                        [python, str(script), name, json.dumps(asdict(settings))],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                        env=own,
                    )
                )

    def wait(self) -> float:
        """Seconds of the round under way, once it has ended; those of the slowest process."""
        late = threading.Timer(PATIENCE_SECONDS, self._give_up)
        late.start()
        try:
            return max(self._answer(process) for process in self._processes)
        finally:
            late.cancel()

    def train_round(self) -> float:
        """Seconds of the next round."""
        for process in self._processes:
            assert process.stdin
            try:
                process.stdin.write("go\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise Ended(self._last_words()) from None
        return self.wait()

    def end(self) -> None:
        """Ends what still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdin
            assert process.stdout
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def _give_up(self) -> None:
        with self._log.open("a") as log:
            log.write(f"no answer within {PATIENCE_SECONDS} seconds\n")
        for process in self._processes:
            process.kill()

    def _answer(self, process: "subprocess.Popen[str]") -> float:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("@ "):
                return float(line[2:])
        raise Ended(self._last_words())

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text().splitlines() if line.strip()]
        return lines[-1] if lines else "no word of its own"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def missing(name: str, pythons: dict[str, str | None]) -> str | None:
    """Why a way cannot be run here, None where it can."""
    if name in pythons:
        python = pythons[name]
        if python is None:
            return f"no environment with it is named: --{name} PYTHON"
        package = {"flower": "flwr, ray"}.get(name, name)
        if subprocess.run(
            [python, "-c", f"import {package}, peft"], capture_output=True, check=False
        ).returncode:
            return f"{python} cannot import {package}"
    if "stacked" in name:
        import inspect

        from fedlight import FederatedLoop

        if "clients_at_once" not in inspect.signature(FederatedLoop).parameters:
            return "this version has no federated.clients_at_once"
    if "two processes" in name:
        from importlib.util import find_spec

        if find_spec("fedlight.processes") is None:
            return "this version has no strategy client_parallel"
    return None


def measure(
    names: Sequence[str],
    settings: Settings,
    pythons: dict[str, str | None],
    threads: int,
    log: Path,
    script: Path = WAYS,
) -> dict[tuple[str, str], list[float]]:
    """(way, size) -> seconds of its measured rounds; a way that fails is left out from there on."""
    started, found = {}, dict[tuple[str, str], list[float]]()
    try:
        for name in names:
            used = 1 if name in ONE_THREAD else threads
            started[name] = Way(name, pythons.get(name) or sys.executable, settings, used, log, script)
        for name in names:
            _try(started, name, Way.wait)
        for size in settings.sizes:
            label = f"{size[0]}x{size[1]}"
            for turn in range(settings.rounds + 1):
                order = list(started)[turn % len(started) :] + list(started)[: turn % len(started)]
                for name in order:
                    seconds = _try(started, name, Way.train_round)
                    if turn and seconds is not None:
                        found.setdefault((name, label), []).append(seconds)
    finally:
        for way in started.values():
            way.end()
    # In the order of the table, which is not that of the turns.
    keys = [(name, f"{size[0]}x{size[1]}") for name in names for size in settings.sizes]
    return {key: found[key] for key in keys if len(found.get(key, [])) == settings.rounds}


def _try(started: dict[str, Way], name: str, work: Any) -> float | None:
    try:
        return float(work(started[name]))
    except Ended as error:
        print(f"  {name} is left out: {error}", flush=True)
        started.pop(name).end()
        return None


def make_model(settings: Settings, given: Path | None, threads: int, log: Path) -> float:
    """Put the given model, or a random one, into the folder of the settings; return its number of parameters."""
    if given is not None:
        Path(settings.folder).symlink_to(given.resolve(strict=True))
    making = Way("make", sys.executable, settings, threads, log)
    weights = making.wait()
    making.end()
    return weights


def compare(found: dict[tuple[str, str], list[float]], clients: int) -> list[dict[str, Any]]:
    """Rows of the table, one for each way and each further comparison; its columns are named by the size, as 2x16."""
    rows: dict[str, dict[str, Any]] = {}
    for (name, size), seconds in found.items():
        row = rows.setdefault(name, {"way": name})
        row |= {f"visits_{size}": clients / statistics.median(seconds)}
        row |= _ratio(found, name, REFERENCES[name], size)
    for name, other in FURTHER:
        for size in dict.fromkeys(size for _, size in found):
            if ratio := _ratio(found, name, other, size):
                way = f"{name} over {other}"
                rows.setdefault(way, {"way": way}).update(ratio)
    return list(rows.values())


def _ratio(found: dict[tuple[str, str], list[float]], name: str, other: str, size: str) -> dict[str, float]:
    if (name, size) not in found or (other, size) not in found:
        return {}
    ratios = [b / a for a, b in zip(found[name, size], found[other, size], strict=True)]
    return {
        f"ratio_{size}": statistics.median(ratios),
        f"low_{size}": min(ratios),
        f"high_{size}": max(ratios),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("rounds", "clients", "steps", "hidden", "layers", "at_once"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Settings, name))
    parser.add_argument(
        "--model", type=Path, help="folder of a language model, in the place of the random one"
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the base under LoRA")
    parser.add_argument("--sizes", nargs="+", default=["x".join(map(str, size)) for size in SIZES])
    parser.add_argument("--threads", type=int, default=2, help="of a way that runs in one process")
    parser.add_argument("--only", nargs="+", choices=REFERENCES, metavar="WAY", help="these ways alone")
    parser.add_argument("--pfl", help="a Python that has pfl-research")
    parser.add_argument("--flower", help="a Python that has Flower with its simulation")
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    parser.add_argument("--cpu", action="store_true", help="processor seconds, of ways with one process")
    options = parser.parse_args(argv)
    os.environ |= {"PEERS_CLOCK": "cpu"} if options.cpu else {}
    pythons, names = {"pfl": options.pfl, "flower": options.flower}, []
    for name in options.only or REFERENCES:
        if reason := missing(name, pythons):
            print(f"  {name} is left out: {reason}", flush=True)
        else:
            names.append(name)
    sizes = [list(map(int, size.split("x"))) for size in options.sizes]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder)
        numbers = {
            name: getattr(options, name)
            for name in ("rounds", "clients", "steps", "hidden", "layers", "at_once", "dtype")
        }
        settings = Settings(str(log / "model"), sizes, **numbers)
        weights = make_model(settings, options.model, options.threads, log)
        print(
            f"{weights:,.0f} parameters, {settings.clients} clients x {settings.steps} steps a round, "
            f"{settings.rounds} rounds, {options.threads} threads",
            flush=True,
        )
        rows = compare(measure(names, settings, pythons, options.threads, log), settings.clients)
    show(rows, options.json)


if __name__ == "__main__":
    main()
