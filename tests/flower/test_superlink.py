import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from fleets import without_wall
from tiny_world import VOTES, table

pytest.importorskip("flwr", reason="the extra flower is not installed")
from fedlight.cli.main import main
from fedlight.devices.outcomes import took_part
from fedlight.flower.rehearsal import HERE, Rehearsal

pytestmark = pytest.mark.skipif(
    "FEDLIGHT_SUPERLINK" not in os.environ, reason="ten minutes of ten processes: make superlink"
)
SECONDS = 420
ARGS = [
    *("--config=selector.yaml", "--trainer.accelerator=cpu"),
    f"--data.source={VOTES}",
    *("--federated.clients_per_round=3", "--federated.local_steps=2"),
]


def said(there):
    return "\n".join(
        f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted((there.folder / "logs").glob("*.log"))
    )


def trained(folder, rounds):
    (checkpoint,) = folder.glob(f"checkpoints/epoch={rounds - 1}.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if "lora_" in name}


def visits(folder):
    return without_wall(table(folder / "visits.csv"))


@dataclass
class Case:
    """A config with what makes it small, settings of the app for its run, and the number of nodes."""

    arguments: list[str]
    app: str = ""
    nodes: int = 2
    rounds: int = 2


FEWFEDPIT = [
    *("--config=fewfedpit.yaml", "--trainer.accelerator=cpu", "--trainer.logger=false"),
    "--trainer.callbacks=[{class_path: fedlight.VisitLog}, {class_path: ModelCheckpoint, init_args: {filename: '{epoch}'}}]",
    *(
        "--data.source=toy:instructions?num_clients=4&client_rows=8",
        "--data.split.test_source=null",
        "--data.keep=3",
    ),
    *(
        "--data.rows.canaries=null",
        "--data.synthesis.number=4",
        "--model.adapter=null",
        "--model.merge_adapter=false",
    ),
]
CASES = {
    "fedbis": Case(ARGS),
    "fedprox": Case([*ARGS, "--federated.algorithm=FedProx", "--federated.algorithm.mu=0.1"]),
    "scaffold": Case(
        [*ARGS, "--federated.algorithm=Scaffold", "--model.optimizer.name=SGD", "--model.optimizer.args={}"]
    ),
    "fedbiscuit": Case(
        [
            *(
                "--config=fedbiscuit.yaml",
                *ARGS[1:3],
                "--data.split.test_source=null",
                "--data.split.val_share=0.2",
            ),
            *(
                "--federated.clients_per_round=3",
                "--federated.local_steps=2",
                "--federated.algorithm.warmup_rounds=1",
            ),
            *("--federated.algorithm.regroup_every=1",),
        ],
        rounds=5,
    ),
    "fewfedpit": Case(FEWFEDPIT),
    "masked": Case([*ARGS, "--federated.clients_per_round=6"], "secure-aggregation=true", nodes=3),
}


def deployed(tmp_path, case):
    """Processes of the case's app."""
    rounds = f"--trainer.max_epochs={case.rounds}"
    main(["flower", "init", case.arguments[0], str(tmp_path / "app"), *case.arguments[1:], rounds])
    return Rehearsal(tmp_path / "app", case.nodes)


def wait_until_over(there, case):
    wait_for(there, lambda: (there.app / f"runs/checkpoints/epoch={case.rounds - 1}.ckpt").exists())
    time.sleep(3)  # the rows of the last round are written behind its checkpoint


def assert_same_end(tmp_path, app, case):
    emulated, there = trained(tmp_path / "emulated", case.rounds), trained(app / "runs", case.rounds)
    assert len(emulated) > 10
    assert all(torch.equal(emulated[name], there[name]) for name in emulated)
    rows, expected = visits(app / "runs"), visits(tmp_path / "emulated")
    for row in [*rows, *expected] if case.app else ():
        del row["bytes_up"], row["loss"]  # of a masked sum: it is a node's, and has no losses of its clients
        # It says in the emulator where a deployment without masks would cap a client's share.
        row["reason"] = row["reason"].replace("large_share", "")
    assert len(rows) >= 2 * case.rounds
    assert rows == expected


def emulate(tmp_path, case):
    from fedlight.lightning_cli.cli import lightning_cli

    where = [f"--trainer.default_root_dir={tmp_path / 'emulated'}", f"--trainer.max_epochs={case.rounds}"]
    lightning_cli(["fit", *case.arguments, *where])


@pytest.mark.parametrize("name", CASES)
def test_a_superlink_and_supernodes_over_tls_end_with_the_emulators_bits_and_bytes(tmp_path, name):
    case = CASES[name]
    emulate(tmp_path, case)
    with deployed(tmp_path, case) as there:
        there.run(case.app)
    assert_same_end(tmp_path, there.app, case)


def test_three_nodes_under_masks_that_share_their_noise_and_validation(tmp_path):
    noise = ["--federated.channel=Wire", "--federated.channel.up=ClipAndNoise"]
    noise += ["--federated.channel.up.clip_norm=0.05", "--federated.channel.up.noise_multiplier=0.2"]
    noise += ["--federated.channel.up.shared_by=3", "--federated.algorithm.weighting=uniform"]
    validated = ["--trainer.callbacks+=fedlight.callbacks.logs.client_accuracy.ClientAccuracy"]
    arguments = [*CASES["masked"].arguments, *noise, *validated, "--data.split.val_share=0.3"]
    case = Case(arguments, CASES["masked"].app, nodes=3)
    emulate(tmp_path, case)
    with deployed(tmp_path, case) as there:
        there.run(case.app)
    emulated, found = trained(tmp_path / "emulated", case.rounds), trained(there.app / "runs", case.rounds)
    distance = sum((found[name] - value).square().sum() for name, value in emulated.items()).sqrt()
    # Nodes draw their noise from the operating system, the emulator draws it from the seed: two means of six in each round,
    # each with a third of the variance.
    numbers = sum(value.numel() for value in emulated.values())
    expected = 0.05 * 0.2 * (2 * case.rounds * numbers / 6 / 3) ** 0.5
    assert 0.5 * expected < distance < 2 * expected
    [metrics] = (there.app / "runs/metrics").rglob("metrics.csv")
    accuracies = [float(row["val/client_mean"]) for row in table(metrics) if row.get("val/client_mean")]
    assert len(accuracies) == case.rounds
    assert all(0 <= accuracy <= 1 for accuracy in accuracies)
    assert not {row["loss"] for row in visits(there.app / "runs")} - {""}


def test_a_server_that_is_killed_five_times_comes_to_the_same_end(tmp_path):
    case = Case(CASES["scaffold"].arguments, rounds=8)
    emulate(tmp_path, case)
    moments = random.Random(os.environ.get("FEDLIGHT_MOMENTS", "0"))
    killed = 0
    with deployed(tmp_path, case) as there:
        while killed < 5:
            there.ask("run", there.app, HERE)
            end = time.monotonic() + SECONDS
            while not (servers := processes(there.folder, "flwr-serverapp")):
                assert time.monotonic() < end, said(there)
                time.sleep(0.2)
            time.sleep(moments.uniform(4, 25))
            for one in servers:
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            killed += 1
        if not (there.app / f"runs/checkpoints/epoch={case.rounds - 1}.ckpt").exists():
            there.ask("run", there.app, HERE)
        wait_until_over(there, case)
    assert_same_end(tmp_path, there.app, case)


def test_a_node_that_was_stopped_does_not_work_through_past_rounds(tmp_path):
    """It receives no message of a round that is over, but for the one that it may have when it is stopped."""
    case = Case(ARGS, "deadline-seconds=60", rounds=6)
    with deployed(tmp_path, case) as there:
        there.ask("run", there.app, HERE, "--run-config", case.app)
        reasons = partial(rounds_with_reasons, there.app / "runs")
        wait_for(there, lambda: (there.app / "runs/checkpoints/epoch=0.ckpt").exists())
        there.running["node1"].send_signal(signal.SIGSTOP)
        wait_for(there, lambda: len(reasons()) >= 3)
        there.running["node1"].send_signal(signal.SIGCONT)
        wait_until_over(there, case)
    received = (there.folder / "logs/node1.log").read_text().count("Receiving: train message")
    assert 3 <= len(reasons()) < case.rounds
    assert received <= 1 + case.rounds - len(reasons()) + 1, said(there)  # joining, rounds, one in hand


class OneSlow(Rehearsal):
    """Rehearsal whose node 1 makes visits of many more steps."""

    def start(self, name, command, *arguments):
        more = [f"{arguments[-1]} federated.local_steps=500"] if name == "node1" else arguments[-1:]
        super().start(name, command, *arguments[:-1], *more)


def test_a_node_that_is_slow_holds_up_nobody_in_buffered_rounds(tmp_path):
    """Six clients work at a time on three nodes; those of the slow one come in with an old model, or not before the end."""
    buffered = ["--federated.fleet=Fleet", "--federated.fleet.buffered=FedBuff"]
    buffered += ["--federated.fleet.buffered.buffer_size=2", "--federated.fleet.buffered.concurrency=6"]
    case = Case([*ARGS, *buffered], nodes=3, rounds=6)
    folder = deployed(tmp_path, case).app
    with OneSlow(folder, case.nodes) as there:
        there.run()
    rows, stale = visits(folder / "runs"), {}
    for row in rows:
        assert int(row["staleness"]) == int(row["round"]) - int(row["asked_round"])
        assert float(row["start_seconds"]) < float(row["arrival_seconds"])
        assert took_part(row["reason"]), said(there)  # a visit of many steps may be over the limits
        assert (row["steps"] == "500") == (row["client"] in ("c001", "c004"))
        stale.setdefault(row["steps"], []).append(int(row["staleness"]))
    assert [int(row["round"]) for row in rows] == [idx for idx in range(6) for _ in range(2)]
    assert min(stale.get("500", [3])) >= 3, said(there)
    [metrics] = (folder / "runs/metrics").rglob("metrics.csv")
    logged = [row for row in table(metrics) if row.get("fed/at_work")]
    assert {row["fed/at_work"] for row in logged} == {"4.0"}
    assert max(float(row["fed/old_models"]) for row in logged) >= 2


def rounds_with_reasons(folder):
    there = (folder / "visits.csv").exists()
    return {row["round"] for row in visits(folder) if row["reason"]} if there else set()


def wait_for(there, done):
    end = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < end, said(there)
        time.sleep(1)


def processes(home, name):
    """Return the processes of a folder of Flower's whose command has a name in it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            own = f"FLWR_HOME={home}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if own and name.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found
