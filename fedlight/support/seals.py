"""Digests that stand in the files that they are of: whatever a disk changes in such a file is noticed when it is read."""

import hashlib
import json
from typing import Any

DIGEST = "digest"
CHANGED = "it is not what was written"
_NUM_BYTES = 8


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """The content with a digest of itself, for a JSON object.

    Example:
        >>> sealed({"a": 1})
        {'a': 1, 'digest': '165b44bb3d3e0923'}
    """
    plain: dict[str, Any] = json.loads(json.dumps(content))  # as it comes back from a file
    return {**plain, DIGEST: _digest(plain)}


def unsealed(content: dict[str, Any]) -> dict[str, Any]:
    """The content without its digest; as it is where it has none.

    Raises:
        ValueError: it is another one than was sealed.
    """
    plain = {key: value for key, value in content.items() if key != DIGEST}
    if content.get(DIGEST, _digest(plain)) != _digest(plain):
        raise ValueError(CHANGED)
    return plain


def sealed_bytes(data: bytes) -> bytes:
    """The data and their digest.

    Example:
        >>> unsealed_bytes(sealed_bytes(b"abc"))
        b'abc'
    """
    return data + hashlib.blake2b(data, digest_size=_NUM_BYTES).digest()


def unsealed_bytes(data: bytes) -> bytes:
    """The data without their digest.

    Raises:
        ValueError: they are other ones than were sealed.
    """
    if sealed_bytes(data[:-_NUM_BYTES]) != data:
        raise ValueError(CHANGED)
    return data[:-_NUM_BYTES]


def _digest(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=_NUM_BYTES).hexdigest()
