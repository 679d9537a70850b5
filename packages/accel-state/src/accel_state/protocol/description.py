"""What a call is, as text: its fingerprint, and the error that shows how the calls of the processes differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

from accel_state.errors import ShapeMismatch
from accel_state.watch.calls import call_text, format_ranks

__all__ = ("CallDescription", "fingerprint_of", "hash_of", "mismatch_error")

_PROTOCOL_VERSION: Final = 1
"""Part of every fingerprint, so that processes with different versions of the protocol notice each other."""

_MAX_NAMED_LEAVES: Final = 5
_ABSENT_LEAF: Final = "absent"

_SAME_CALL_REMEDY: Final = (
    "Make every process reach the same calls in the same order. The usual cause is a branch on the rank around one of "
    "them."
)
_HOME_THREAD: Final = "the thread in which the run began"
_ONE_THREAD_REMEDY: Final = (
    "Call collectives in one thread, and in the same one on all processes; or pass each thread a process group of its "
    "own with `group`. Threads that take turns have the same name on all processes: give them one with `name`, or with "
    "`thread_name_prefix` of their pool."
)
_SHAPES_REMEDY: Final = (
    "Use gather_object(), which takes any shapes; rows that only pad a result would be counted in metrics."
)


class CallDescription(NamedTuple):
    """The call of one process as text; the processes exchange it only when the fingerprints differ.

    Args:
        operation: name of the collective.
        arguments: the arguments that must be equal, as text by name.
        leaves: path, shape and dtype of each leaf.
        location: the line of the user's code.
        refusal: why the process could not take part, as the three parts of an error; None if it could.
        group: name of the group of the call in messages; empty for all processes of the run.
        thread: the thread that called, see `accel_state.protocol.turn`.
        overlaps: whether threads with this name have called at the same time.
    """

    operation: str
    arguments: dict[str, str]
    leaves: list[tuple[str, str, str]]
    location: str = ""
    refusal: tuple[str, str, str] | None = None
    group: str = ""
    thread: str = ""
    overlaps: bool = False

    def to_json(self) -> bytes:
        """The description as JSON."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def from_json(cls, text: bytes) -> CallDescription:
        """The description that `to_json` wrote."""
        fields = json.loads(text)
        fields["leaves"] = [tuple(leaf) for leaf in fields["leaves"]]
        fields["refusal"] = fields["refusal"] and tuple(fields["refusal"])
        return cls(**fields)


def fingerprint_of(description: CallDescription) -> int:
    """A 64-bit hash, equal on all processes for equal descriptions."""
    fields = (_PROTOCOL_VERSION, description.operation, description.arguments, description.leaves)
    return hash_of(json.dumps(fields, sort_keys=True))


def hash_of(text: str) -> int:
    """A 64-bit hash of text, equal on all processes; Python's `hash` differs between processes."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mismatch_error(descriptions: Sequence[CallDescription], ranks: Sequence[int] = ()) -> ShapeMismatch:
    """The error for calls that differ; equal on all processes.

    Args:
        descriptions: what each process called.
        ranks: ranks of the processes in the run; by default from 0.
    """
    ranks = ranks or range(len(descriptions))
    return (
        _refusal_error(descriptions, ranks)
        or _thread_error(descriptions, ranks)
        or _operation_error(descriptions, ranks)
        or _argument_error(descriptions, ranks)
        or _leaf_error(descriptions, ranks)
        or ShapeMismatch(
            f"Cannot run {_call_text(descriptions[0])}: the processes disagree on the protocol.",
            "They run different versions of this library or of Python.",
            "Install the same versions everywhere.",
        )
    )


def _call_text(call: CallDescription) -> str:
    return call_text(call.operation, call.group, call.location)


def _refusal_error(descriptions: Sequence[CallDescription], ranks: Sequence[int]) -> ShapeMismatch | None:
    refused = {rank: call.refusal for rank, call in zip(ranks, descriptions, strict=True) if call.refusal}
    if not refused:
        return None
    rank, (failed, obstacle, remedy) = next(iter(refused.items()))
    return ShapeMismatch(
        f"Cannot run {_call_text(descriptions[0])}: {format_ranks(list(refused))} could not take part.",
        f"On rank {rank}: {failed} {obstacle}".rstrip(),
        remedy,
    )


def _thread_error(descriptions: Sequence[CallDescription], ranks: Sequence[int]) -> ShapeMismatch | None:
    threads = [f"the thread {call.thread!r}" if call.thread else _HOME_THREAD for call in descriptions]
    overlapping = [rank for rank, call in zip(ranks, descriptions, strict=True) if call.overlaps]
    if overlapping:
        return ShapeMismatch(
            f"Cannot run {_call_text(descriptions[0])}: several threads call collectives at the same time.",
            f"The call comes from {_by_rank(threads, ranks)}. On {format_ranks(overlapping)} that thread has called "
            "while another one was in a call, so each process may get values of another thread.",
            _ONE_THREAD_REMEDY,
        )
    if len(set(threads)) == 1:
        return None
    return ShapeMismatch(
        f"Cannot run {_call_text(descriptions[0])}: the processes called it in different threads.",
        f"The call comes from {_by_rank(threads, ranks)}, so each process may get values of another thread.",
        _ONE_THREAD_REMEDY,
    )


def _operation_error(descriptions: Sequence[CallDescription], ranks: Sequence[int]) -> ShapeMismatch | None:
    if len({call.operation for call in descriptions}) == 1:
        return None
    called = _by_rank([_call_text(call) for call in descriptions], ranks)
    return ShapeMismatch(
        "The processes called different collectives at the same time.", f"{called}.", _SAME_CALL_REMEDY
    )


def _argument_error(descriptions: Sequence[CallDescription], ranks: Sequence[int]) -> ShapeMismatch | None:
    for name in descriptions[0].arguments:
        values = [call.arguments[name] for call in descriptions]
        if len(set(values)) > 1:
            return ShapeMismatch(
                f"Cannot run {_call_text(descriptions[0])}: the processes passed different values of {name}.",
                f"{name} is {_by_rank(values, ranks)}.",
                f"Pass the same {name} on every process.",
            )
    return None


def _leaf_error(descriptions: Sequence[CallDescription], ranks: Sequence[int]) -> ShapeMismatch | None:
    leaves = [{path: (shape, dtype) for path, shape, dtype in call.leaves} for call in descriptions]
    paths = dict.fromkeys(path for own in leaves for path in own)
    differing = [path for path in paths if len({own.get(path) for own in leaves}) > 1]
    if not differing:
        return None
    texts = [
        f"{path or 'the tensor'}: {_by_rank([_leaf_text(path, own) for own in leaves], ranks)}" for path in differing
    ]
    more = len(texts) - _MAX_NAMED_LEAVES
    obstacle = "; ".join(texts[:_MAX_NAMED_LEAVES]) + (f"; and {more} more leaves" if more > 0 else "")
    if any(path not in own for path in differing for own in leaves):
        what, remedy = "structures", "Pass the same structure on every process, with the same keys and lengths."
    elif any(len({own[path][1] for own in leaves}) > 1 for path in differing):
        what, remedy = "dtypes", "Convert the tensors to one dtype before the call."
    else:
        pads = descriptions[0].operation == "gather"
        what, remedy = "shapes", _SHAPES_REMEDY if pads else "Pass tensors of the same shapes on every process."
    return ShapeMismatch(
        f"Cannot run {_call_text(descriptions[0])}: the data of the processes have different {what}.",
        f"{obstacle}.",
        remedy,
    )


def _leaf_text(path: str, leaves: Mapping[str, tuple[str, str]]) -> str:
    return f"{leaves[path][0]} {leaves[path][1]}" if path in leaves else _ABSENT_LEAF


def _by_rank(values: Sequence[str], ranks: Sequence[int]) -> str:
    """Values with the ranks that have them: "3 on rank 0, 4 on ranks 1-3"."""
    members: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        members.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {format_ranks(owners)}" for value, owners in members.items())
