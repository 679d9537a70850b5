"""Messages with a signature: only those of processes with the same secret are read."""

from __future__ import annotations

import pytest

from accel_state.errors import CollectiveError
from accel_state.network import SECRET_VARIABLE
from accel_state.transport.signature import SIGNATURE_BYTES, sign, signed_content


def message(monkeypatch, secret, content=b"content"):
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    signed = bytearray(SIGNATURE_BYTES) + content
    sign(signed)
    return bytes(signed)


@pytest.mark.parametrize("secret", ["", "secret", "s" * 1000])
def test_a_message_with_the_own_secret_is_read(monkeypatch, secret):
    assert bytes(signed_content(message(monkeypatch, secret))) == b"content"


@pytest.mark.parametrize("secret", ["", "another secret"])
def test_a_message_with_another_secret_or_none_is_refused(monkeypatch, secret):
    foreign = message(monkeypatch, secret)
    monkeypatch.setenv(SECRET_VARIABLE, "secret")
    with pytest.raises(CollectiveError, match=r"\$ACCEL_RUN_SECRET"):
        signed_content(foreign)


@pytest.mark.parametrize("position", [0, SIGNATURE_BYTES - 1, SIGNATURE_BYTES, -1])
def test_a_changed_message_is_refused(monkeypatch, position):
    changed = bytearray(message(monkeypatch, "secret"))
    changed[position] ^= 1
    with pytest.raises(CollectiveError, match="not signed"):
        signed_content(changed)


@pytest.mark.parametrize("length", [0, 1, SIGNATURE_BYTES - 1, SIGNATURE_BYTES])
def test_a_message_that_is_too_short_is_refused(monkeypatch, length):
    monkeypatch.setenv(SECRET_VARIABLE, "secret")
    with pytest.raises(CollectiveError, match="not signed"):
        signed_content(bytes(length))


def test_without_a_secret_nothing_is_refused(monkeypatch):
    foreign = message(monkeypatch, "secret")
    monkeypatch.delenv(SECRET_VARIABLE)
    assert bytes(signed_content(foreign)) == b"content"
