"""Kills runs with SIGKILL at random moments and compares their results to those of an undisturbed run.

Two commands, each in a separate process, killed again and again until it gets through:

* ``recipe``: the demo, smaller: 4 rounds of 4 clients, 40 prompts to label and 40 to judge, and no ceiling.
* ``fit``: the demo's selector, 6 rounds of SCAFFOLD on a fleet of devices, the updates thinned out (top-k with error
  feedback), all clients' memories on disk; each start goes on from the newest checkpoint.
* ``processes``, where it is asked for: ``fit`` on two processes; one or the other is killed. The one that is left
  has 30 seconds to end by itself, or else the run has failed. One that says that it waits for the other to start is ended
  here, as torchrun or Lightning would: it cannot know whether the other one is still to come.

A moment is drawn evenly from the measured length of the undisturbed run. A run is killed up to four times and then left
alone. It counts as equal if results.json, adapters, JSON lines, clients' memories and visits.csv are the same to the last
bit, but for wall seconds and the marks of processes in file names. Memories that are left over, of kills between their
last note and the end of a checkpoint, take room and are counted by themselves.

The findings are in FOLDER/kills.json; the same command goes on from there, and begins no run after --minutes.

Run: python benchmarks/kills.py [--kills 50] [--minutes 60] [--what recipe fit] [--folder runs/kills]
"""

import argparse
import contextlib
import csv
import hashlib
import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from fedlight.cli.main import main as fedlight
from fedlight.federation import client_state
from fedlight.support.files import read_json, sealed, write_json

KILLS_OF_A_RUN = 4
OUTLIVES_SECONDS = 30
LEFT_BEHIND = 1000
"""Exit code, which no process has, of a run with a process that did not end when the other was killed."""
WAITS = "waits for the other 1 of 2"
"""What a process says while it waits for the other one to start."""
TIMES = ("seconds",)
CEILING = ("label_by_oracle", "dpo_by_oracle", "answers_oracle", "verdict")


def command_of(what: str, folder: Path) -> list[str]:
    """The arguments of ``fedlight`` that begin a run, and go on with it."""
    if what == "recipe":
        small = ["rounds=4", "clients_per_round=4", "num_prompts=40", "num_eval_prompts=40", "dpo_epochs=1"]
        without = [f"stages.{name}.when=false" for name in CEILING]
        return ["run", "demo", *small, *without, "accelerator=cpu", "--output", str(folder)]
    command = [
        *(
            "fit",
            "--config=selector.yaml",
            "--trainer.accelerator=cpu",
            f"--trainer.default_root_dir={folder}",
        ),
        *("--model.model=toy", "--model.optimizer.name=SGD", "--model.optimizer.args={}", "--model.lr=0.05"),
        *("--data=data/toy_votes.yaml", "--trainer.max_epochs=6", "--federated.clients_per_round=6"),
        *("--federated.local_steps=3", "--federated.algorithm=Scaffold", "--federated.fleet=Fleet"),
        *("--federated.fleet.devices=phones", "--federated.channel=Wire", "--federated.channel.up=TopK"),
        *("--federated.channel.up.share=0.1", "--federated.channel.up.error_feedback=true"),
    ]
    if what == "processes":
        command += ["--trainer.strategy=client_parallel", "--trainer.devices=2"]
    return command


def attempt(what: str, folder: Path, kill_after: float | None) -> int | None:
    """Starts the command, or goes on with it, in two processes where ``what`` says so.

    Args:
        what: which command.
        folder: of the run.
        kill_after: seconds until it is killed, unless it has ended by then; None lets it end.

    Returns:
        Its exit code; None where it was killed.
    """
    arguments = command_of(what, folder)
    places = places_of(what)
    # torch and Lightning are imported by now: there is nothing to be killed in that
    log = folder.with_suffix(".log")
    said = len(log.read_text()) if log.exists() else 0
    children = [_fork(arguments, log, place) for place in places]
    victim = children[0 if kill_after is None else int(kill_after * 1e6) % len(children)]
    handle = os.pidfd_open(victim)
    try:
        ended = select.select([handle], [], [], kill_after)[0]
        if not ended:
            os.kill(victim, signal.SIGKILL)
    finally:
        os.close(handle)
    codes = {child: _code_of(child) for child in children}
    if codes[victim] == -signal.SIGKILL:
        others = [code for child, code in codes.items() if child != victim]
        met = not log.exists() or WAITS not in log.read_text()[said:]
        return LEFT_BEHIND if -signal.SIGKILL in others and met else None
    return max(codes.values(), key=abs)


def places_of(what: str) -> list[dict[str, str]]:
    """The environment of each process of a command, set like its starter does."""
    if what != "processes":
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "NODE_RANK": "0"}
    return [{**common, "LOCAL_RANK": str(rank)} for rank in range(2)]


def _fork(arguments: list[str], log: Path, place: dict[str, str]) -> int:
    child = os.fork()
    if child == 0:
        os.environ.update(place)
        client_state.LIMIT_MIB = 0  # memories are in files, which a kill may leave behind
        _be(arguments, log)
    return child


def _code_of(child: int) -> int:
    """The exit code of a process, which is killed if it takes longer than another one may outlive its own."""
    handle = os.pidfd_open(child)
    try:
        if not select.select([handle], [], [], OUTLIVES_SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _be(arguments: list[str], log: Path) -> None:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            try:
                fedlight(arguments)
                code = 0
            except SystemExit as stop:
                if isinstance(stop.code, str):
                    print(stop.code, file=sys.stderr)
                code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(code)


def what_counts(folder: Path) -> dict[str, str]:
    """Digests of all that a run leaves and that has to be equal, by file."""
    found: dict[str, str] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        if file.name == "results.json":
            results = json.loads(file.read_text())
            found[name] = _digest(json.dumps({**results, "seconds": None, "digest": None}).encode())
        elif file.suffix == ".csv" and file.parent.parent.name != "metrics":
            rows = list(csv.DictReader(file.read_text().splitlines()))
            timeless = [{key: value for key, value in row.items() if key not in TIMES} for row in rows]
            found[name] = _digest(json.dumps(timeless).encode())
        elif file.suffix in (".jsonl", ".safetensors"):
            found[name] = _digest(file.read_bytes())
    return found


def memories(folder: Path) -> list[str]:
    """The files of clients' memories: client, round and digest, without the process that wrote them."""
    parts = [file.stem.split("-") for file in folder.glob("clients/*")]
    return sorted("-".join([*one[:2], *one[3:]]) for one in parts)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def where(what: str, folder: Path) -> str:
    """The place where a run was killed: the stage of a recipe, the round of a fit."""
    if what != "recipe":
        return f"in round {1 + len(list(folder.glob('checkpoints/*.ckpt')))}"
    begun = [file.parent for file in folder.glob("seed*/*/settings.json")]
    open_ = [stage.name for stage in begun if not (stage / "done.json").exists()]
    return open_[0] if open_ else "between stages"


def disturb(what: str, folder: Path, seed: str, expected: dict[str, Any]) -> dict[str, Any]:
    """One run, killed until it gets through; its folder goes if all is equal."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_suffix(".log").unlink(missing_ok=True)
    moments = random.Random(seed)
    killed_at: list[str] = []
    start = time.monotonic()
    code: int | None = None
    while code is None:
        last = len(killed_at) == KILLS_OF_A_RUN
        code = attempt(what, folder, None if last else moments.uniform(0, expected["seconds"]))
        if code is None:
            killed_at.append(where(what, folder))
    found, kept = what_counts(folder), Counter(memories(folder))
    wanted, needed = expected["leaves"], Counter(expected["memories"])
    differing = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    differing += sorted((needed - kept).keys())
    left_over = sum((kept - needed).values())
    if code == 0 and not differing:
        shutil.rmtree(folder)
        folder.with_suffix(".log").unlink()
    return {"killed_at": killed_at, "code": code, "differing": differing, "left_over": left_over} | (
        {} if killed_at else {"seconds": time.monotonic() - start}
    )


def undisturbed(what: str, folder: Path) -> dict[str, Any]:
    """Its seconds and the files that it leaves."""
    shutil.rmtree(folder, ignore_errors=True)
    start = time.monotonic()
    code = attempt(what, folder, None)
    if code != 0:
        sys.exit(f"the undisturbed {what} ends with {code}: see {folder.with_suffix('.log')}")
    seconds = time.monotonic() - start
    return {"seconds": seconds, "leaves": what_counts(folder), "memories": memories(folder)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Kills until there are enough, or the time is up."""
    record = options.folder / "kills.json"
    remedy = f"delete {options.folder}, and all is done again"
    found: dict[str, Any] = read_json(record, remedy) if record.is_file() else {}
    deadline = time.monotonic() + 60 * options.minutes
    for what in options.what:
        if what not in found:
            found[what] = {**undisturbed(what, options.folder / f"{what}_undisturbed"), "runs": []}
            write_json(record, sealed(found))
        of = found[what]
        while (
            sum(len(run["killed_at"]) for run in of["runs"]) < options.kills and time.monotonic() < deadline
        ):
            number = len(of["runs"])
            seed = f"{options.seed} {what} {number}"
            run = disturb(what, options.folder / f"{what}_{number}", seed, of)
            of["runs"].append(run)
            # Where the machine was busy before, moments would fall behind the end.
            of["seconds"] = min(of["seconds"], run.get("seconds", of["seconds"]))
            write_json(record, sealed(found))
            print(
                f"{what} {number}: {len(run['killed_at'])} kills, {_verdict(run)}",
                file=sys.stderr,
                flush=True,
            )
    return found


def _verdict(run: dict[str, Any]) -> str:
    if run["code"] != 0:
        return f"ends with {run['code']}"
    return f"differs in {', '.join(run['differing'][:3])}" if run["differing"] else "equal"


def table(found: dict[str, Any]) -> str:
    """Counts for each command, in Markdown."""
    lines = [
        "| command | seconds undisturbed | kills | runs | equal | different | failed | memories left over |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for what, of in found.items():
        verdicts = Counter(
            "failed" if run["code"] else "different" if run["differing"] else "equal" for run in of["runs"]
        )
        kills = [moment for run in of["runs"] for moment in run["killed_at"]]
        counts = [len(kills), len(of["runs"]), verdicts["equal"], verdicts["different"], verdicts["failed"]]
        counts.append(sum(run["left_over"] for run in of["runs"]))
        lines.append(f"| {what} | {of['seconds']:.0f} | {' | '.join(map(str, counts))} |")
    lines.append("")
    for what, of in found.items():
        moments = Counter(moment for run in of["runs"] for moment in run["killed_at"])
        lines.append(
            f"{what}: killed "
            + ", ".join(f"{count} times {moment}" for moment, count in sorted(moments.items()))
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Prints the table; 1 where a run was not equal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="of each command")
    parser.add_argument("--minutes", type=float, default=60, help="after which no further run is begun")
    parser.add_argument(
        "--what", nargs="+", choices=("recipe", "fit", "processes"), default=["recipe", "fit"]
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"))
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(argv)
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # before the forks: a pool of threads does not survive one
    importlib.import_module("fedlight.lightning_cli.cli")
    found = measure(options)
    print(table(found))
    return int(any(run["code"] or run["differing"] for of in found.values() for run in of["runs"]))


if __name__ == "__main__":
    sys.exit(main())
