"""Signatures, which prove that a process of the run has sent something: it knows the secret of the run.

The secret is in `accel_state.network.SECRET_VARIABLE`. Without one, as under plain torchrun, nothing is authenticated.

Reading a pickle runs code of its sender, and the connections of torch.distributed do not prove who that is. Therefore
each pickle begins with a signature, and is read only if this is right.

Any process that reaches the port of a store can write to it. Therefore a message in a store contains an HMAC of the
run, the attempt, the key, the writer, a sequence number and the message.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from accel_state.errors import CollectiveError
from accel_state.network import SECRET_VARIABLE

__all__ = ("SIGNATURE_BYTES", "Signer", "sign", "signed_content")

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


_FORMAT_PREFIX: Final = b"accel1"
"""First part of a message in a store."""

_MAC_DIGITS: Final = 32

_sequence_lock: Final = threading.Lock()
_last_sequence = 0


class _Read(NamedTuple):
    mac: bytes
    rank: int
    sequence: int
    payload: bytes


class Signer:
    """Signs messages, and accepts those that are authentic and new.

    Args:
        scope: prefix of all keys.
        secret: secret of the run, by default that of the environment. If empty, messages are not authenticated.
    """

    def __init__(self, scope: str, secret: str | None = None) -> None:
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # The attempt is included only if attempts share a store: else a replacement machine counts only its own.
        names = ("TORCHELASTIC_RUN_ID", *(("TORCHELASTIC_RESTART_COUNT",) if shared else ()))
        self._run = "\0".join([*(os.environ.get(name, "") for name in names), scope]).encode()
        self._secret = (os.environ.get(SECRET_VARIABLE, "") if secret is None else secret).encode()
        self._newest: dict[tuple[str, int], int] = {}

    def sign(self, key: str, rank: int, payload: bytes) -> bytes:
        """The message of a rank under a key, signed."""
        sequence = _next_sequence()
        return b"%s %s %d %d %s" % (_FORMAT_PREFIX, self._mac(key, rank, sequence, payload), rank, sequence, payload)

    def read(self, key: str, text: bytes) -> bytes | None:
        """The message, or None if it is not authentic or older than the newest one."""
        message = _parse(text)
        if message is None:
            return None
        expected = self._mac(key, message.rank, message.sequence, message.payload)
        # Without a secret too: the other processes have one then.
        if not hmac.compare_digest(expected, message.mac):
            return None
        writer = (key, message.rank)
        if message.sequence < self._newest.get(writer, 0):
            return None
        self._newest[writer] = message.sequence
        return message.payload

    def forget(self, keys: Iterable[str]) -> None:
        """Forget the messages that were read under some keys."""
        gone = set(keys)
        self._newest = {writer: number for writer, number in self._newest.items() if writer[0] not in gone}

    def _mac(self, key: str, rank: int, sequence: int, payload: bytes) -> bytes:
        if not self._secret:
            return b"-"
        covered = b"\0".join([self._run, key.encode(), b"%d" % rank, b"%d" % sequence, payload])
        return hmac.digest(self._secret, covered, "sha256").hex()[:_MAC_DIGITS].encode()


def _parse(text: bytes) -> _Read | None:
    parts = text.split(b" ", 4)
    if len(parts) != 5 or parts[0] != _FORMAT_PREFIX or not (parts[2].isdigit() and parts[3].isdigit()):
        return None
    return _Read(parts[1], int(parts[2]), int(parts[3]), parts[4])


def _next_sequence() -> int:
    """A number above all that this process or an earlier process of its rank has used."""
    global _last_sequence
    with _sequence_lock:
        _last_sequence = max(_last_sequence + 1, time.time_ns())
        return _last_sequence
