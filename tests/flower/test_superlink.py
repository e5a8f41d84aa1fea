"""FedBis under Flower itself: a SuperLink and two SuperNodes as processes on loopback, with TLS."""

import csv
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="the extra flower is not installed")
pytestmark = pytest.mark.skipif(
    "FEDLIGHT_SUPERLINK" not in os.environ, reason="a minute of ten processes: make superlink"
)
BIN = Path(sys.executable).parent
SECONDS = 420
ARGS = [
    *("--config=selector.yaml", "--trainer.accelerator=cpu", "--trainer.max_epochs=2"),
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

    yield start
    for one in running:
        with suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        one.wait()


def said(folder):
    return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("*.log")))


def trained(folder):
    (checkpoint,) = folder.glob("checkpoints/epoch=1.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if "lora_" in name}


def visits(folder):
    with (folder / "visits.csv").open() as file:
        return [
            {name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)
        ]


def test_a_superlink_and_two_supernodes_over_tls_end_with_the_emulators_bits_and_bytes(tmp_path, started):
    from fedlight.lightning_cli.cli import lightning_cli

    lightning_cli(["fit", *ARGS, f"--trainer.default_root_dir={tmp_path / 'emulated'}"])

    certificates(tmp_path)
    app, port = tmp_path / "app", free_port()
    started("fedlight", "flower", "init", ARGS[0], app, *ARGS[1:], wait=True)
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.tls]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{tmp_path / "ca.crt"}"\n'
    )
    signed = [f"--ssl-{name}={tmp_path / file}" for name, file in FILES.items()]
    where = ["--host=127.0.0.1", f"--port={port}", "--disable-runtime-dependency-installation"]
    started("flower-superlink", *signed, *where)
    for number in range(2):
        node = f'partition-id={number} num-partitions=2 folder="{tmp_path / f"node{number}"}"'
        there = [f"--superlink=127.0.0.1:{port}", f"--root-certificates={tmp_path / 'ca.crt'}"]
        started(
            "flower-supernode", *there, "--host=127.0.0.1", f"--port={free_port()}", f"--node-config={node}"
        )
    wait_for_port(port)
    started("flwr", "run", app, "tls", wait=True)

    end = time.monotonic() + SECONDS
    while not (app / "runs/checkpoints/epoch=1.ckpt").exists():
        assert time.monotonic() < end, said(tmp_path)
        time.sleep(1)
    time.sleep(3)  # the rows of the last round are written behind its checkpoint

    emulated, deployed = trained(tmp_path / "emulated"), trained(app / "runs")
    assert len(emulated) > 10
    assert all(torch.equal(emulated[name], deployed[name]) for name in emulated)
    rows = visits(app / "runs")
    assert len(rows) == 6
    assert rows == visits(tmp_path / "emulated")
    assert {*rows[0]} >= {"bytes_down", "bytes_up", "loss"}


FILES = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}


def wait_for_port(port):
    for _ in range(240):
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise TimeoutError(f"nobody listens on port {port}")
