"""Rehearsal of a deployment on one machine: a SuperLink and SuperNodes as processes, with TLS and registered keys."""

import datetime
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from fedlight.support.checks import refuse_below

HERE = "here"
"""Name of the SuperLink in Flower's configuration of a rehearsal."""
PATIENCE_SECONDS = 120.0


class Rehearsal:
    """SuperLink and SuperNodes of an app; as a context they run until it is left, with all that they have started.

    ``APP/rehearsal`` holds certificates and keys, new ones each time, logs, and Flower's configuration. Nodes keep what
    their clients remember in ``APP/nodes``, as on devices.

    Args:
        app: folder that ``fedlight flower init`` has written.
        nodes: SuperNodes, at least 1; of the clients in the app's data, node i serves every ``nodes``-th from the i-th on.

    Raises:
        ModuleNotFoundError: Flower is not installed.
        ValueError: ``nodes`` is below 1, or ``app`` is no folder of an app.
    """

    def __init__(self, app: Path, nodes: int) -> None:
        refuse_below(1, nodes=nodes)
        self.app = app.expanduser().absolute()
        if not (self.app / "pyproject.toml").is_file():
            raise ValueError(
                f"{app} has no pyproject.toml: make the app with fedlight flower init --config FILE {app}"
            )
        self.nodes, self.folder = nodes, self.app / "rehearsal"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **os.environ,
            "FLWR_HOME": str(self.folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": search_path(),  # Flower's processes start further ones
        }

    def __enter__(self) -> "Rehearsal":
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        make_certificates(self.folder)
        port, folder = free_port(), self.folder
        (folder / "config.toml").write_text(
            f"[superlink.{HERE}]\naddress = {json.dumps(f'127.0.0.1:{port}')}\n"
            f"root-certificates = {json.dumps(str(folder / 'ca.crt'))}\n"
        )
        try:
            self.start(
                "superlink",
                "flower-superlink",
                *("--host=127.0.0.1", f"--port={port}", "--enable-supernode-auth"),
                *("--disable-runtime-dependency-installation", f"--ssl-ca-certfile={folder / 'ca.crt'}"),
                *(f"--ssl-certfile={folder / 'server.crt'}", f"--ssl-keyfile={folder / 'server.key'}"),
            )
            self._wait_for(port)
            for number in range(self.nodes):
                self.ask("supernode", "register", make_node_key(folder / f"node{number}"), HERE)
                self.start_node(number, port)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def start_node(self, number: int, port: int) -> None:
        """Start a SuperNode, given the SuperLink's port."""
        config = {
            "folder": str(self.app / f"nodes/{number}"),
            "partition-id": number,
            "num-partitions": self.nodes,
        }
        self.start(
            f"node{number}",
            "flower-supernode",
            *(f"--superlink=127.0.0.1:{port}", f"--root-certificates={self.folder / 'ca.crt'}"),
            *("--host=127.0.0.1", f"--port={free_port()}"),
            f"--auth-supernode-private-key={self.folder / f'node{number}'}",
            f"--node-config={' '.join(f'{key}={json.dumps(value)}' for key, value in config.items())}",
        )

    def start(self, name: str, command: str, *arguments: str) -> None:
        """Start a process of Flower that writes to ``logs/NAME.log`` and is stopped with the rehearsal."""
        with (self.folder / f"logs/{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                [path_of(command), *arguments],
                cwd=self.app,
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that it can be stopped with its children
            )

    def ask(self, *arguments: str | Path) -> dict[str, Any]:
        """Return the answer of ``flwr`` to a command as JSON.

        Raises:
            OSError: the command has failed.
        """
        command = [path_of("flwr"), *map(str, arguments), "--format=json"]
        answer = subprocess.run(command, env=self._environment, capture_output=True, text=True, cwd=self.app)
        if answer.returncode:
            raise OSError(
                f"flwr {' '.join(map(str, arguments))} has failed: {(answer.stdout + answer.stderr)[-500:]}"
            )
        read: dict[str, Any] = json.loads(answer.stdout)
        return read

    def run(self, run_config: str = "") -> None:
        """Run the app to its end and show the server's log; ``run_config`` overrides settings of the app.

        Raises:
            OSError: the run has failed, or a process of the rehearsal has ended before it.
        """
        command = [path_of("flwr"), "run", ".", HERE, "--stream"]
        command += ["--run-config", run_config] if run_config else []
        shown = subprocess.Popen(command, cwd=self.app, env=self._environment, start_new_session=True)
        try:
            while shown.poll() is None:
                self._refuse_ended()
                time.sleep(0.5)
        finally:
            stop(shown)
        last = self.ask("list", HERE, "--limit=1")["runs"][0]
        if last["status"] != "finished:completed":
            raise OSError(f"the run has ended as {last['status']}: {last['status-details']}")

    def _refuse_ended(self) -> None:
        for name, process in self.running.items():
            if process.poll() is not None:
                log = self.folder / f"logs/{name}.log"
                lines = log.read_text(errors="replace").splitlines()[-5:]
                raise OSError(f"{name} has ended with {process.returncode}: {' '.join(lines)} ({log})")

    def _wait_for(self, port: int) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            self._refuse_ended()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise TimeoutError(
            f"no SuperLink on port {port} after {PATIENCE_SECONDS:.0f} s: {self.folder / 'logs'}"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self.running.values()):
            stop(process)
        self.running.clear()


def search_path() -> str:
    """Return where commands are looked for, in this environment first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def path_of(command: str) -> str:
    """Return the path of one of Flower's commands, that of this environment first."""
    if (where := shutil.which(command, path=search_path())) is None:
        raise ModuleNotFoundError(f"there is no {command}: pip install 'fedlight[flower]'")
    return where


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process with its children, after ten seconds by force."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_certificates(folder: Path) -> None:
    """Write ``ca.crt``, ``ca.key``, ``server.crt`` and ``server.key`` for this machine."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import NameOID

    now, issuer_key = datetime.datetime.now(datetime.UTC), None
    authority, server = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("rehearsal", "localhost")
    )
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    for name, subject in (("ca", authority), ("server", server)):
        key = ec.generate_private_key(ec.SECP384R1())
        issuer_key = issuer_key or key
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=name == "ca", path_length=None), critical=True)
            .add_extension(names, critical=False)
            # Python 3.13 verifies that a certificate names both keys, and what an authority's key is for.
            .add_extension(_usage(is_authority=name == "ca"), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
            )
            .sign(issuer_key, hashes.SHA384())
        )
        write_key(folder / f"{name}.key", key, openssh=False)
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(Encoding.PEM))


def _usage(is_authority: bool) -> Any:
    from cryptography.x509 import KeyUsage

    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return KeyUsage(digital_signature=not is_authority, key_cert_sign=is_authority, **unused)


def make_node_key(file: Path) -> Path:
    """Write a node's private key and, with the ending ``.pub``, its public one; return the file of the latter."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key, public = ec.generate_private_key(ec.SECP384R1()), file.with_suffix(".pub")
    write_key(file, key, openssh=True)
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return public


def write_key(file: Path, key: Any, openssh: bool) -> None:
    """Write a private key that only its owner can read."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    kind = PrivateFormat.OpenSSH if openssh else PrivateFormat.PKCS8
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(key.private_bytes(Encoding.PEM, kind, NoEncryption()))
