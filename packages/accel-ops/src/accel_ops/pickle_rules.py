"""What a rule for the names in a pickle sees: descriptions of what would be made, and the memory left for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

__all__ = (
    "BYTES_PER_BYTE",
    "Budget",
    "Call",
    "Global",
    "Made",
    "PickleRefused",
    "Rule",
    "Rules",
    "demand",
    "is_made",
    "numbers_in",
)

BYTES_PER_BYTE: Final = 64
"""How many bytes of memory each byte of a file may take."""

_FREE_BYTES: Final = 1 << 28


class PickleRefused(ValueError):
    """A pickle is damaged, or does what no pickle of data does."""


def demand(condition: object, text: str) -> None:
    """Refuse a pickle unless a condition holds.

    Raises:
        PickleRefused: it does not.
    """
    if not condition:
        raise PickleRefused(text)


@dataclass
class Budget:
    """How much memory the content of a file may take: 64 bytes for each byte of the file, and 256 MiB.

    Args:
        size: bytes of the file.
    """

    size: int
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = BYTES_PER_BYTE * self.size + _FREE_BYTES

    def spend(self, count: int) -> None:
        """Count bytes that reading makes.

        Raises:
            PickleRefused: they are more than are left.
        """
        self.left -= count
        demand(self.left >= 0, f"its {self.size} bytes would take more memory than {self.size} bytes of data can")


@dataclass(frozen=True)
class Global:
    """A class, function or constant that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Made:
    """Describes a container or an object that the reader would make.

    Attributes:
        kind: "tuple", "list", "dict", "set", or the name of what made it.
        parts: what it holds; keys and values in turn for mappings, arguments for objects.
        state: what BUILD gave it.
        facts: what a rule wants to know about it later.
        carries: whether a tuple holds names that are not data; only a call may take it.
    """

    __slots__ = ("carries", "facts", "kind", "parts", "rule", "size", "state")

    def __init__(self, kind: str, parts: list[Any], facts: Any = None) -> None:
        self.kind = kind
        self.parts = parts
        self.facts = facts
        self.state: Any = None
        self.rule: Rule | None = None
        self.carries = False
        self.size = 1


Call: TypeAlias = Callable[[Global, list[Any], Budget], Any]
Build: TypeAlias = Callable[[Made, Any, Budget], None]


@dataclass(frozen=True)
class Rule:
    """How pickles of data use one name.

    Args:
        call: checks the arguments of a call and describes its result; no call is admitted without it.
        new: the same of `cls.__new__`.
        build: checks the state that an object is given, once, after it is made; no state is admitted without it.
        constant: the name itself is data, such as a dtype.
        items: it is a mapping, whose items are set one by one.
        key: it may be a key of a mapping.
    """

    call: Call | None = None
    new: Call | None = None
    build: Build | None = None
    constant: bool = False
    items: bool = False
    key: bool = False


Rules: TypeAlias = Mapping[tuple[str, str], Rule]


def is_made(value: Any, *kinds: str) -> bool:
    """Whether a value is a container or object of one of these kinds."""
    return isinstance(value, Made) and value.kind in kinds


def numbers_in(value: Any) -> list[int]:
    """The integers of a tuple or `torch.Size`, none of them negative.

    Raises:
        PickleRefused: it is something else.
    """
    demand(is_made(value, "tuple", "list", "torch.Size"), "a shape is not a tuple")
    demand(all(type(part) is int and 0 <= part < 2**63 for part in value.parts), "a shape has parts that are none")
    return list(value.parts)
