"""Runs under Flower itself: a SuperLink and SuperNodes as processes on loopback, with TLS."""

import csv
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="the extra flower is not installed")
pytestmark = pytest.mark.skipif(
    "FEDLIGHT_SUPERLINK" not in os.environ, reason="ten minutes of ten processes: make superlink"
)
BIN = Path(sys.executable).parent
SECONDS = 420
ARGS = [
    *("--config=selector.yaml", "--trainer.accelerator=cpu"),
    *("--data.source=toy:votes?num_clients=6&votes_per_client=10",),
    *("--federated.clients_per_round=3", "--federated.local_steps=2"),
]


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def certificates(folder):
    """An authority of one's own, and a certificate of 127.0.0.1 signed by it."""
    (folder / "names").write_text(
        "subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n"
    )
    authority = [
        "-addext",
        "basicConstraints=critical,CA:TRUE",
        "-addext",
        "keyUsage=critical,keyCertSign,cRLSign",
    ]
    for command in (
        [
            "req",
            "-x509",
            *NEW_KEY,
            "ca.key",
            "-out",
            "ca.crt",
            "-days",
            "2",
            "-subj",
            "/CN=authority",
            *authority,
        ],
        ["req", *NEW_KEY, "server.key", "-out", "server.csr", "-subj", "/CN=localhost"],
        [
            *("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-out", "server.crt", "-extfile", "names"),
        ],
    ):
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)


NEW_KEY = ["-newkey", "rsa:2048", "-nodes", "-keyout"]


@pytest.fixture
def started(tmp_path):
    """Function that starts a process of Flower, which ends with the test, with all of its children."""
    environment = {
        **os.environ,
        **{
            "FLWR_HOME": str(tmp_path / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        },
        **{"OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    running = []

    def start(name, *arguments, wait=False):
        command = [sys.executable, str(BIN / name), *map(str, arguments)]
        with (tmp_path / f"{name}-{len(running)}.log").open("wb") as log:
            one = subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        running.append(one)
        if wait:
            assert one.wait(120) == 0, said(tmp_path)
        return one

    start.running = running
    yield start
    for one in running:
        with suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        one.wait()


def said(folder):
    return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log")))


def trained(folder, rounds):
    (checkpoint,) = folder.glob(f"checkpoints/epoch={rounds - 1}.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if "lora_" in name}


def visits(folder):
    with (folder / "visits.csv").open() as file:
        return [
            {name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)
        ]


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


def deployed(tmp_path, started, case):
    """Start a SuperLink with TLS and SuperNodes; return the app's folder."""
    certificates(tmp_path)
    app, port = tmp_path / "app", free_port()
    rounds = f"--trainer.max_epochs={case.rounds}"
    started("fedlight", "flower", "init", case.arguments[0], app, *case.arguments[1:], rounds, wait=True)
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.tls]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{tmp_path / "ca.crt"}"\n'
    )
    signed = [f"--ssl-{name}={tmp_path / file}" for name, file in FILES.items()]
    where = ["--host=127.0.0.1", f"--port={port}", "--disable-runtime-dependency-installation"]
    started("flower-superlink", *signed, *where)
    for number in range(case.nodes):
        node = f'partition-id={number} num-partitions={case.nodes} folder="{tmp_path / f"node{number}"}"'
        there = [f"--superlink=127.0.0.1:{port}", f"--root-certificates={tmp_path / 'ca.crt'}"]
        started(
            "flower-supernode", *there, "--host=127.0.0.1", f"--port={free_port()}", f"--node-config={node}"
        )
    wait_for_port(port)
    return app


def run(started, app, case):
    more = ["--run-config", case.app] if case.app else []
    started("flwr", "run", app, "tls", *more, wait=True)


def wait_until_over(tmp_path, app, case):
    wait_for(tmp_path, lambda: (app / f"runs/checkpoints/epoch={case.rounds - 1}.ckpt").exists())
    time.sleep(3)  # the rows of the last round are written behind its checkpoint


def assert_same_end(tmp_path, app, case):
    emulated, there = trained(tmp_path / "emulated", case.rounds), trained(app / "runs", case.rounds)
    assert len(emulated) > 10
    assert all(torch.equal(emulated[name], there[name]) for name in emulated)
    rows, expected = visits(app / "runs"), visits(tmp_path / "emulated")
    for row in [*rows, *expected] if case.app else ():
        del row["bytes_up"], row["loss"]  # of a masked sum: it is a node's, and has no losses of its clients
    assert len(rows) >= 2 * case.rounds
    assert rows == expected


def emulate(tmp_path, case):
    from fedlight.lightning_cli.cli import lightning_cli

    where = [f"--trainer.default_root_dir={tmp_path / 'emulated'}", f"--trainer.max_epochs={case.rounds}"]
    lightning_cli(["fit", *case.arguments, *where])


@pytest.mark.parametrize("name", CASES)
def test_a_superlink_and_supernodes_over_tls_end_with_the_emulators_bits_and_bytes(tmp_path, started, name):
    case = CASES[name]
    emulate(tmp_path, case)
    app = deployed(tmp_path, started, case)
    run(started, app, case)
    wait_until_over(tmp_path, app, case)
    assert_same_end(tmp_path, app, case)


def test_a_server_that_is_killed_five_times_comes_to_the_same_end(tmp_path, started):
    case = Case(CASES["scaffold"].arguments, rounds=8)
    emulate(tmp_path, case)
    app = deployed(tmp_path, started, case)
    moments = random.Random(os.environ.get("FEDLIGHT_MOMENTS", "0"))
    killed = 0
    while killed < 5:
        run(started, app, case)
        end = time.monotonic() + SECONDS
        while not (servers := processes(tmp_path / "home", "flwr-serverapp")):
            assert time.monotonic() < end, said(tmp_path)
            time.sleep(0.2)
        time.sleep(moments.uniform(4, 25))
        for one in servers:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        killed += 1
    if not (app / f"runs/checkpoints/epoch={case.rounds - 1}.ckpt").exists():
        run(started, app, case)
    wait_until_over(tmp_path, app, case)
    assert_same_end(tmp_path, app, case)


def test_a_node_that_was_stopped_does_not_work_through_past_rounds(tmp_path, started):
    """It receives no message of a round that is over, but for the one that it may have when it is stopped."""
    case = Case(ARGS, "deadline-seconds=60", rounds=6)
    app = deployed(tmp_path, started, case)
    run(started, app, case)
    reasons = partial(rounds_with_reasons, app / "runs")
    wait_for(tmp_path, lambda: (app / "runs/checkpoints/epoch=0.ckpt").exists())
    node = started.running[3]  # after init, the SuperLink and the other node
    node.send_signal(signal.SIGSTOP)
    wait_for(tmp_path, lambda: len(reasons()) >= 3)
    node.send_signal(signal.SIGCONT)
    wait_until_over(tmp_path, app, case)
    log = (tmp_path / "flower-supernode-3.log").read_text()
    received = log.count("Receiving: train message")
    assert 3 <= len(reasons()) < case.rounds
    assert received <= 1 + case.rounds - len(reasons()) + 1, said(tmp_path)  # joining, rounds, one in hand


def rounds_with_reasons(folder):
    there = (folder / "visits.csv").exists()
    return {row["round"] for row in visits(folder) if row["reason"]} if there else set()


def wait_for(tmp_path, done):
    end = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < end, said(tmp_path)
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


FILES = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}


def wait_for_port(port):
    for _ in range(240):
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise TimeoutError(f"nobody listens on port {port}")
