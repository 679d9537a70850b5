"""What each process called, what of it must be equal, and how the calls differ in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Final

from accel_state.errors import ShapeMismatch
from accel_state.hang_report.sightings import ranks

__all__ = ("Description", "fingerprint_of", "mismatch")

_PROTOCOL: Final = 1
"""Version of what travels; part of every fingerprint, so that processes with different versions are told apart."""

_MOST_LEAVES: Final = 5
_ABSENT: Final = "absent"

_SAME_CALL: Final = (
    "Let every process reach the same calls in the same order. A branch on the rank around one of them is the usual "
    "cause."
)
_PAD: Final = "Call pad_across_processes() on the data first, or gather_object() if the shapes are meant to differ."


@dataclass(frozen=True)
class Description:
    """What one process called, in words; exchanged only when the fingerprints differ.

    Args:
        operation: name of the collective.
        arguments: those that must be equal, as text by name.
        leaves: path, shape and dtype of each leaf.
        location: the line of the user's code.
        refusal: why the process could not take part, in the three parts of an error; empty when it could.
    """

    operation: str
    arguments: dict[str, str]
    leaves: list[tuple[str, str, str]]
    location: str = ""
    refusal: tuple[str, str, str] | None = None

    def to_json(self) -> bytes:
        """The description as it travels."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Description:
        """The description that `to_json` wrote."""
        fields = json.loads(text)
        fields["leaves"] = [tuple(leaf) for leaf in fields["leaves"]]
        fields["refusal"] = fields["refusal"] and tuple(fields["refusal"])
        return cls(**fields)


def fingerprint_of(description: Description) -> int:
    """64 bits that are equal on all processes for equal descriptions; Python's own `hash` differs between them."""
    text = json.dumps((_PROTOCOL, description.operation, description.arguments, description.leaves), sort_keys=True)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mismatch(descriptions: Sequence[Description]) -> ShapeMismatch:
    """The error for calls that differ; equal on all processes.

    Args:
        descriptions: what each process called, by rank.
    """
    return (
        _refused(descriptions)
        or _different_operations(descriptions)
        or _different_arguments(descriptions)
        or _different_leaves(descriptions)
        or ShapeMismatch(
            f"{_asked(descriptions)} could not begin.",
            "The processes run different versions of this library or of Python.",
            "Install the same versions everywhere.",
        )
    )


def _asked(descriptions: Sequence[Description]) -> str:
    first = descriptions[0]
    return f"{first.operation}() at {first.location}" if first.location else f"{first.operation}()"


def _refused(descriptions: Sequence[Description]) -> ShapeMismatch | None:
    refused = {rank: seen.refusal for rank, seen in enumerate(descriptions) if seen.refusal}
    if not refused:
        return None
    rank, (asked, obstacle, remedy) = next(iter(refused.items()))
    return ShapeMismatch(
        f"{_asked(descriptions)} could not begin, because {ranks(list(refused))} could not take part.",
        f"On rank {rank}: {asked} {obstacle}".rstrip(),
        remedy,
    )


def _different_operations(descriptions: Sequence[Description]) -> ShapeMismatch | None:
    if len({seen.operation for seen in descriptions}) == 1:
        return None
    called = _by_rank([_asked([seen]) for seen in descriptions])
    return ShapeMismatch("The processes met in different collectives.", f"{called}.", _SAME_CALL)


def _different_arguments(descriptions: Sequence[Description]) -> ShapeMismatch | None:
    for name in descriptions[0].arguments:
        values = [seen.arguments[name] for seen in descriptions]
        if len(set(values)) > 1:
            return ShapeMismatch(
                f"{_asked(descriptions)} was called with different arguments.",
                f"{name} is {_by_rank(values)}.",
                f"Give every process the same {name}.",
            )
    return None


def _different_leaves(descriptions: Sequence[Description]) -> ShapeMismatch | None:
    seen = [{path: (shape, dtype) for path, shape, dtype in one.leaves} for one in descriptions]
    paths = dict.fromkeys(path for leaves in seen for path in leaves)
    differing = [path for path in paths if len({leaves.get(path) for leaves in seen}) > 1]
    if not differing:
        return None
    told = [f"{path or 'the tensor'}: {_by_rank([_leaf(path, one) for one in seen])}" for path in differing]
    more = len(told) - _MOST_LEAVES
    obstacle = "; ".join(told[:_MOST_LEAVES]) + (f"; and {more} more leaves" if more > 0 else "")
    return ShapeMismatch(
        f"{_asked(descriptions)} was given different data by the processes.",
        f"{obstacle}.",
        _remedy(descriptions[0].operation, differing, seen),
    )


def _leaf(path: str, leaves: Mapping[str, tuple[str, str]]) -> str:
    return f"{leaves[path][0]} {leaves[path][1]}" if path in leaves else _ABSENT


def _remedy(operation: str, differing: Sequence[str], seen: Sequence[Mapping[str, tuple[str, str]]]) -> str:
    if any(path not in leaves for path in differing for leaves in seen):
        return "Give every process the same structure, with the same keys and lengths."
    if any(len({leaves[path][1] for leaves in seen}) > 1 for path in differing):
        return "Convert the tensors to one dtype before the call."
    return _PAD if operation == "gather" else "Give every process tensors of the same shapes."


def _by_rank(values: Sequence[str]) -> str:
    """Values with the ranks that have them: "3 on rank 0, 4 on ranks 1-3"."""
    members: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        members.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {ranks(owners)}" for value, owners in members.items())
