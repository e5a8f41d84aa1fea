"""Digests inside files: damage is noticed when such a file is read."""

import hashlib
import json
from typing import Any

DIGEST = "digest"
CHANGED = "it is not what was written"
_NUM_BYTES = 8


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON object with its digest.

    Example:
        >>> sealed({"a": 1})
        {'a': 1, 'digest': '165b44bb3d3e0923'}
    """
    plain: dict[str, Any] = json.loads(json.dumps(content))  # as it is read back from a file
    return {**plain, DIGEST: _digest(plain)}


def unsealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content without its digest; unchanged if it has none.

    Raises:
        ValueError: the digest is of other content.
    """
    plain = {key: value for key, value in content.items() if key != DIGEST}
    if content.get(DIGEST, _digest(plain)) != _digest(plain):
        raise ValueError(CHANGED)
    return plain


def sealed_bytes(data: bytes) -> bytes:
    """Return the data with their digest.

    Example:
        >>> unsealed_bytes(sealed_bytes(b"abc"))
        b'abc'
    """
    return data + hashlib.blake2b(data, digest_size=_NUM_BYTES).digest()


def unsealed_bytes(data: bytes) -> bytes:
    """Return the data without their digest.

    Raises:
        ValueError: the digest is of other data.
    """
    if sealed_bytes(data[:-_NUM_BYTES]) != data:
        raise ValueError(CHANGED)
    return data[:-_NUM_BYTES]


def _digest(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=_NUM_BYTES).hexdigest()
