"""Cryptographic parts of secure aggregation, all of them those of well-kept libraries.

Keys are agreed on by X25519 and HKDF with SHA-256, masks are streams of ChaCha20, shares are sealed by ChaCha20-Poly1305
(package cryptography), and secrets are shared by Shamir's scheme over GF(2^128) (package pycryptodome). A key is used once:
for one pair of nodes in one round and for one purpose.
"""

import hashlib
import os

from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedlight.flower.messages import Refused
from fedlight.flower.secure.ring import BYTES, Ring, from_bytes

KEY_BYTES = 32
"""Of a private or public key, and of a seed."""
HOLDER_BYTES, BLOCK_BYTES = 4, 16
"""Of the number of a share's holder, and of a field element."""
SHARE_BYTES = HOLDER_BYTES + KEY_BYTES
"""Of a share: the number of its holder, and an element for each block of the secret."""
NONCE_BYTES, TAG_BYTES = 12, 16
LETTER_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + TAG_BYTES
"""Of a sealed letter with two shares."""


def new_secret() -> bytes:
    """Return a private key or a seed, from the system's random numbers: it must not be possible to draw it again."""
    return os.urandom(KEY_BYTES)


def public_key(private: bytes) -> bytes:
    """Return the public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def commitment(secret: bytes) -> bytes:
    """Return by what others can tell a secret of 32 random bytes once they have it (SHA-256)."""
    return hashlib.sha256(secret).digest()


def agreed_key(private: bytes, public: bytes, purpose: str) -> bytes:
    """Return the key of 32 bytes that two holders of a private key agree on, each by the other's public one.

    Raises:
        Refused: the public key is none.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:
        raise Refused("a public key of a node is none") from error
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=f"fedlight {purpose}".encode()).derive(shared)


def stream(key: bytes, elements: int) -> Ring:
    """Return so many elements of the ring that look uniform without the key."""
    # A key has one stream, so the nonce may be fixed.
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None)
    return from_bytes(cipher.encryptor().update(bytes(elements * BYTES)))


def seal(key: bytes, data: bytes, about: str) -> bytes:
    """Return data that only holders of the key can read, bound to its subject ``about``."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, data, about.encode())


def unseal(key: bytes, letter: bytes, about: str) -> bytes:
    """Return what `seal` was given; raise Refused if the letter is damaged, of another key, or about something else."""
    try:
        return ChaCha20Poly1305(key).decrypt(letter[:NONCE_BYTES], letter[NONCE_BYTES:], about.encode())
    except InvalidTag as error:
        raise Refused("a letter between nodes is damaged, or not the one of this round") from error


def split(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """Return shares of a secret of `KEY_BYTES` for holders 1 to ``number``; any ``threshold`` of them give it back."""
    shares = [holder.to_bytes(HOLDER_BYTES, "little") for holder in range(1, number + 1)]
    for start in range(0, KEY_BYTES, BLOCK_BYTES):
        for holder, block in Shamir.split(threshold, number, secret[start : start + BLOCK_BYTES], ssss=False):
            shares[holder - 1] += block
    return shares


def join(shares: list[bytes]) -> bytes:
    """Return the secret behind shares of `SHARE_BYTES`, or other bytes if they are wrong or too few.

    Raises:
        Refused: two of them have the same holder.
    """
    holders = [int.from_bytes(share[:HOLDER_BYTES], "little") for share in shares]
    starts = range(HOLDER_BYTES, SHARE_BYTES, BLOCK_BYTES)
    blocks = [[share[start:][:BLOCK_BYTES] for share in shares] for start in starts]
    try:
        return b"".join(Shamir.combine([*zip(holders, block, strict=True)], ssss=False) for block in blocks)
    except ValueError as error:
        raise Refused("two shares of a secret have the same holder") from error


def threshold_of(nodes: int) -> int:
    """Return how many of the nodes have to stay for a sum: more than half, and two thirds where that is more.

    Examples:
        >>> [threshold_of(number) for number in (3, 4, 5, 6, 9, 10, 100)]
        [2, 3, 3, 4, 6, 6, 66]
    """
    # More than half: no two parts of the nodes can be asked for shares that together unmask one of them.
    return max(nodes // 2 + 1, 2 * nodes // 3)
