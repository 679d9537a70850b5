"""Signatures of the pickles that the processes of a run send to each other.

Reading a pickle runs code of its sender, and the connections of torch.distributed do not prove who that is. Therefore
each pickle begins with a signature, computed with the secret of the run (`accel_state.network.SECRET_VARIABLE`), and is
read only if this is right. Without a secret, as under plain torchrun, pickles are not authenticated.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from functools import lru_cache
from typing import Final

from accel_state.errors import CollectiveError
from accel_state.network import SECRET_VARIABLE

__all__ = ("SIGNATURE_BYTES", "sign", "signed_content")

SIGNATURE_BYTES: Final = 32
"""Length of a signature."""

_PURPOSE: Final = b"accel pickle"


def sign(message: bytearray | memoryview) -> None:
    """Write the signature of the rest of a message into its first `SIGNATURE_BYTES` bytes."""
    message[:SIGNATURE_BYTES] = _signature(memoryview(message)[SIGNATURE_BYTES:])


def signed_content(message: bytes | memoryview) -> memoryview:
    """The message without its signature.

    Raises:
        CollectiveError: it was not signed with the secret of this run.
    """
    view = memoryview(message)
    content = view[SIGNATURE_BYTES:]
    if _key() is not None and not hmac.compare_digest(_signature(content), view[:SIGNATURE_BYTES]):
        raise CollectiveError(
            "Cannot read an object that another process has sent.",
            f"It is not signed with the secret of this run (${SECRET_VARIABLE}). The sender has another secret or "
            "none, or it is a program outside the run that has connected to it.",
            f"Set the same {SECRET_VARIABLE} for every process, and keep the ports of the run unreachable for others.",
        )
    return content


def _signature(content: memoryview) -> bytes:
    key = _key()
    if key is None:
        return bytes(SIGNATURE_BYTES)
    return hashlib.blake2b(content, digest_size=SIGNATURE_BYTES, key=key).digest()


def _key() -> bytes | None:
    secret = os.environ.get(SECRET_VARIABLE)
    return _derived(secret) if secret else None


@lru_cache(maxsize=1)
def _derived(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode(), person=_PURPOSE).digest()
