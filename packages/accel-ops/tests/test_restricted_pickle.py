"""Only the names of a table are found, and only instances of its classes get a state."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from accel_ops.restricted_pickle import load_restricted


@dataclass
class Point:
    x: int
    y: int = 0


class WithState:
    def __setstate__(self, state: Any) -> None:
        self.state = state


NAMES = {(__name__, "Point"): Point, (__name__, "WithState"): WithState, ("math", "pi"): 3.14}


def named(name: str, module: str = __name__) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def test_listed_classes_and_plain_data_are_read() -> None:
    content = {"points": [Point(1, 2)], "plain": (1, 2.5, b"bytes", "text", {3}, None)}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        if protocol >= 4:
            assert load_restricted(pickle.dumps(content, protocol), NAMES) == content
    assert load_restricted(b"\x80\x04" + named("pi", "math") + b".", NAMES) == 3.14
    assert load_restricted(b"\x80\x04" + named("WithState") + b")\x81K\x07b.", NAMES).state == 7


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(print),
        pickle.dumps(pickle.Pickler),
        b"\x80\x04" + named("Point.__init__") + b".",
        b"\x80\x04" + named("system", "os") + b"(X\x04\x00\x00\x00truetR.",
        b"\x80\x04(ios\nsystem\n.",
        b"\x80\x04K\x01Q.",
        b"\x80\x02\x82\x01.",
    ],
    ids=["a builtin", "a class", "an attribute", "a call", "an old call", "a reference", "an extension"],
)
def test_nothing_else_is_found(content: bytes) -> None:
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        load_restricted(content, NAMES)


STATE = b"}X\x01\x00\x00\x00xK\x05s"
SLOTS = b"N" + STATE + b"\x86"


@pytest.mark.parametrize("state", [STATE, SLOTS], ids=["fields", "slots"])
@pytest.mark.parametrize("target", [named("Point"), named("pi", "math"), b"K\x01"], ids=["class", "value", "number"])
def test_a_state_for_anything_but_an_instance_is_refused(target: bytes, state: bytes) -> None:
    before = dict(vars(Point))
    with pytest.raises(pickle.UnpicklingError, match="gives a state to"):
        load_restricted(b"\x80\x04" + target + state + b"b.", NAMES)
    assert dict(vars(Point)) == before


@pytest.mark.parametrize("state", [SLOTS, b"K\x01", b"}K\x01K\x01s"], ids=["slots", "a number", "a key"])
def test_a_state_that_does_not_consist_of_fields_is_refused(state: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match="does not consist of fields"):
        load_restricted(b"\x80\x04" + named("Point") + b")\x81" + state + b"b.", NAMES)


def test_other_unpicklers_stay_as_they_are() -> None:
    load_restricted(pickle.dumps(1), NAMES)
    assert pickle._loads(pickle.dumps(Point(1))) == Point(1)  # type: ignore[attr-defined]


HASHED = {
    "a key": b"}(%sNu.",
    "one key": b"}%sNs.",
    "a dict": b"(%sNd.",
    "a set": b"\x8f(%s\x90.",
    "a frozen set": b"(%s\x91.",
}


@pytest.mark.parametrize("where", HASHED)
def test_tuples_inside_of_each_other_are_not_hashed_forever(where: str) -> None:
    # Each tuple has the one before it twice.
    doubled = b")" + b"q\x01h\x01\x86" * 100
    with pytest.raises(pickle.UnpicklingError, match="inside of each other without end"):
        load_restricted(HASHED[where] % doubled, {})
    assert load_restricted(HASHED[where] % b")q\x01h\x01\x86", {}) in ({((), ()): None}, {((), ())})
