"""Signing key of a node, kept in its folder: a restarted node proves with it that it is the same node.

Signatures are those of Ed25519 (package cryptography). Flower's ids and, without registered keys, Flower's keys are new
at each start of a SuperNode; this key is as old as the folder.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlight.flower.messages import Refused, hex_of
from fedlight.support.files import write_whole

KEY_BYTES, SIGNATURE_BYTES = 32, 64


def own_key(folder: Path) -> bytes:
    """Return the private key in a node's folder, made if there is none; raise Refused if the file is damaged."""
    file = folder / "node.key"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, os.urandom(KEY_BYTES).hex())
        file.chmod(0o600)
    try:
        return hex_of({"key": file.read_text()}, "key", KEY_BYTES)
    except ValueError as error:
        raise Refused(
            f"{file} is damaged: restore it, or remove it and start a new run, in which the node has a new key"
        ) from error


def signed(private: bytes, run: str, nonce: str) -> dict[str, str]:
    """Return the public key and the signature that show the server of a run which node answers."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(private)
    return {"key": key.public_key().public_bytes_raw().hex(), "signature": key.sign(_text(run, nonce)).hex()}


def verified(header: Mapping[str, Any], run: str, nonce: str) -> str:
    """Return the public key of the node that has signed an answer.

    Raises:
        Refused: key or signature are missing, or do not belong together.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key, signature = hex_of(header, "key", KEY_BYTES), hex_of(header, "signature", SIGNATURE_BYTES)
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _text(run, nonce))
    except (InvalidSignature, ValueError) as error:
        raise Refused("its signature is not that of its key") from error
    return key.hex()


def _text(run: str, nonce: str) -> bytes:
    # With the nonce and the run, so that a signature cannot be used again.
    # As a list: glued together, other pairs of a run and a nonce could give the same text.
    return json.dumps(["fedlight join", run, nonce]).encode()
