import socket
import ssl
import stat
import subprocess
import sys
import threading

import pytest

from fedlight.flower import rehearsal
from fedlight.flower.rehearsal import Rehearsal, make_certificates, make_node_key, stop

serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")


def handshake(folder, host, authority):
    """Whether a client that trusts ``authority`` takes the server's certificate for a host."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.crt", folder / "server.key")
    here, there = socket.socketpair()

    def serve():
        try:
            server.wrap_socket(here, server_side=True).close()
        except OSError:
            here.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client = ssl.create_default_context(cafile=authority)
        client.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
        with client.wrap_socket(there, server_hostname=host):
            return True
    except ssl.SSLCertVerificationError:
        return False
    finally:
        there.close()
        thread.join()


def test_certificates_are_of_this_machine(tmp_path):
    folder, other = tmp_path / "a", tmp_path / "b"
    for each in (folder, other):
        each.mkdir()
        make_certificates(each)
    assert handshake(folder, "127.0.0.1", folder / "ca.crt")
    assert handshake(folder, "localhost", folder / "ca.crt")
    assert not handshake(folder, "example.org", folder / "ca.crt")
    assert not handshake(folder, "127.0.0.1", other / "ca.crt")
    make_certificates(folder)  # of a second rehearsal
    assert handshake(folder, "127.0.0.1", folder / "ca.crt")


def test_keys_are_their_owners_alone(tmp_path):
    publics = [make_node_key(tmp_path / "node0").read_bytes() for _ in range(2)]
    assert publics[0] != publics[1]
    private = serialization.load_ssh_private_key((tmp_path / "node0").read_bytes(), None)
    assert private.public_key() == serialization.load_ssh_public_key(publics[1])
    make_certificates(tmp_path)
    for name in ("node0", "ca.key", "server.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_what_cannot_be_rehearsed_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no pyproject\.toml: make the app with fedlight flower init"):
        Rehearsal(tmp_path, 2)
    (tmp_path / "pyproject.toml").write_text("")
    with pytest.raises(ValueError, match="nodes=0"):
        Rehearsal(tmp_path, 0)


def test_a_missing_flower_is_named(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match=r"no flower-superlink: pip install 'fedlight\[flower\]'"):
        Rehearsal(tmp_path, 1).__enter__()


def test_a_superlink_that_ends_is_named_with_its_last_lines(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("")
    script = tmp_path / "ends"
    script.write_text("#!/bin/sh\necho the port is taken\nexit 3\n")
    script.chmod(0o700)
    monkeypatch.setattr(rehearsal, "path_of", lambda command: str(script))
    with pytest.raises(OSError, match=r"superlink has ended with 3: the port is taken \(.*superlink.log\)"):
        Rehearsal(tmp_path, 1).__enter__()


def test_a_process_is_stopped_with_its_children(tmp_path):
    script = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"up\n"
        stop(process)
        assert process.stdout.read() == b""  # else the child would hold it open
