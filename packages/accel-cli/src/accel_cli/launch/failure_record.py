"""The record of an error that ended a script: its traceback, and a fingerprint to compare two errors.

It is written in the JSON format of torch.distributed.elastic, to the file that `TORCHELASTIC_ERROR_FILE` names. Like
`run_script`, which loads it after an error, this file imports only the standard library.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from traceback import StackSummary
    from types import FrameType, TracebackType
    from typing import Any

__all__ = ("failure_fingerprint", "folded", "record_error")

_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_OUR_PACKAGES = frozenset(
    f"accel_{name}" for name in ("state", "ops", "data", "bigmodel", "tracking", "plugins", "cli", "torch")
) | {"accelerate"}
_MAX_SAMPLES = 64
_MAX_SAMPLE_CHARACTERS = 100
_MAX_CHAIN_LENGTH = 8
_MAX_CAUSE_CHARACTERS = 1000


def record_error(error: BaseException, shown: bool) -> bool:
    """Write the error file, and return whether that worked."""
    path = os.environ.get(_ERROR_FILE_VARIABLE)
    if not path:
        return False
    import json
    import time
    import traceback

    now = time.time()
    trace = folded(error)
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    extra = {"py_callstack": trace, "timestamp": str(int(now)), "time": now, "pid": os.getpid(), "shown": shown}
    # Ranks that this process waited for (from `accel_state.watch.report`): they caused its error.
    extra["missed"] = getattr(error, "_accel_missed", [])
    try:
        extra["fingerprint"] = failure_fingerprint(error)
    except Exception:
        # Reading an attribute of an error may run the script's code.
        extra["fingerprint"] = {}
    try:
        partial = f"{path}.{os.getpid()}"
        with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
        os.replace(partial, path)
    except OSError:
        return False
    return True


def failure_fingerprint(error: BaseException) -> dict[str, Any]:
    """The fingerprint with which two failures are compared: see `accel_cli.launch.failures.Fingerprint`."""
    record = getattr(sys.modules.get("accel_state.watch.record"), "STATUS_RECORD", None)
    chain = _chain(error)
    frames = [frame for one in chain for frame in _frames(one.__traceback__)]
    places = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in _lines(chain[0].__traceback__)]
    own = [place for place in places if _is_of_the_script(place[0])]
    path, line, name = (own or places or [("", 0, "")])[-1]
    # A guard of training steps raises an error with the samples and the kind of the failure (`accel_state.errors`).
    judged = next((one for one in chain if "BadStep" in [base.__name__ for base in type(one).__mro__]), None)
    samples = list(getattr(judged, "samples", ())) or _samples_of(frames)
    if not samples and record is not None:
        samples = record.samples(_read_by_workers(frames))
    return {
        "type": f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
        "frame": f"{path}:{line} in {name}" if path else "",
        "step": record.run_step if record is not None else 0,
        "samples": [str(sample)[:_MAX_SAMPLE_CHARACTERS] for sample in samples[:_MAX_SAMPLES]],
        "kind": str(getattr(judged, "kind", "")),
        "causes": [
            {
                "types": [base.__qualname__ for base in type(one).__mro__[:-2]],
                "errno": getattr(one, "errno", None) if isinstance(one, OSError) else None,
                "text": str(one)[:_MAX_CAUSE_CHARACTERS],
            }
            for one in chain
        ],
    }


def _chain(error: BaseException) -> list[BaseException]:
    """The error and its causes, the newest first."""
    chain, left = [error], error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while left is not None and len(chain) < _MAX_CHAIN_LENGTH and left not in chain:
        chain.append(left)
        left = left.__cause__ or (None if left.__suppress_context__ else left.__context__)
    return chain


def _lines(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    lines = []
    while trace is not None:
        lines.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return lines


def _frames(trace: TracebackType | None) -> list[FrameType]:
    return [frame for frame, _ in _lines(trace)]


def _is_of_the_script(path: str) -> bool:
    folders = (os.path.dirname(os.__file__) + os.sep, f"{os.sep}site-packages{os.sep}")
    ours = any(f"{os.sep}{name}{os.sep}" in path for name in _OUR_PACKAGES)
    return not (path.startswith(("<", folders[0])) or folders[1] in path or ours)


def _samples_of(frames: list[FrameType]) -> list[str]:
    """Ids of the samples that a loader was reading when the error occurred: one sample, or its batch."""
    fetch = os.path.join("torch", "utils", "data", "_utils", "fetch.py")
    reading = [frame.f_locals for frame in frames if frame.f_code.co_filename.endswith(fetch)]
    read: object = None
    for names in reading:
        read = names.get("possibly_batched_index", read)
    for names in reading:
        # Up to Python 3.11 this is the frame of a comprehension, later the frame of `fetch`.
        read = names.get("idx", read)
    seeded = any(type(getattr(names.get("self"), "dataset", None)).__name__ == "SeededSamples" for names in reading)
    batch = [] if read is None else read if isinstance(read, list) else [read]
    return [
        str(index[-1] if seeded and isinstance(index, tuple) else index)[:_MAX_SAMPLE_CHARACTERS] for index in batch
    ]


def _read_by_workers(frames: list[FrameType]) -> int | None:
    """Number of the batch that a DataLoader worker failed to read; None for another error."""
    loader = os.path.join("torch", "utils", "data", "dataloader.py")
    for frame in frames:
        if frame.f_code.co_name == "_process_data" and frame.f_code.co_filename.endswith(loader):
            return int(frame.f_locals["self"]._rcvd_idx) - 1
    return None


def folded(error: BaseException) -> str:
    """The traceback of an error as Python shows it, with one line for consecutive frames of accel.

    If accel raised an error that is not one of its typed errors, which is a bug in accel, that frame is shown.
    """
    from traceback import TracebackException

    shown = TracebackException(type(error), error, error.__traceback__)
    left = [(shown, error)]
    while left:
        part, raised = left.pop()
        part.stack = _without_own_runs(part.stack, _is_typed(raised))
        chained = [(part.__cause__, raised.__cause__), (part.__context__, raised.__context__)]
        chained += zip(getattr(part, "exceptions", None) or (), getattr(raised, "exceptions", ()), strict=False)
        left += [(inner, cause) for inner, cause in chained if inner is not None and cause is not None]
    return "".join(shown.format())


def _is_typed(error: BaseException) -> bool:
    return any(base.__module__ == "accel_state.errors" for base in type(error).__mro__)


def _without_own_runs(stack: StackSummary, typed: bool) -> StackSummary:
    from itertools import groupby
    from traceback import StackSummary

    loaded = [sys.modules.get(name) for name in _OUR_PACKAGES] if "accel_state" in sys.modules else []
    files = [getattr(module, "__file__", None) for module in loaded]
    folders = tuple(os.path.dirname(file) + os.sep for file in files if file)
    ours = {id(frame) for frame in stack if frame.filename.startswith(folders)}
    if not typed and stack:
        ours.discard(id(stack[-1]))

    class Folding(StackSummary):
        def format(self, **options: Any) -> list[str]:
            lines: list[str] = []
            for hidden, run in groupby(self, lambda frame: id(frame) in ours):
                frames = list(run)
                count = f"{len(frames)} frame{'s' if len(frames) > 1 else ''}"
                lines += [f"  (... {count} of accel)\n"] if hidden else StackSummary.from_list(frames).format(**options)
            return lines

    return Folding(stack)
