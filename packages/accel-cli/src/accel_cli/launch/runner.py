"""Runs a script inside a started process as `python script.py` would, and records its error for the launcher.

    python runner.py script train.py --lr 1e-3
    python runner.py module package.train --lr 1e-3
    python runner.py program ./train --lr 1e-3

The script runs in the real `__main__`, so that pickling, spawned processes, threads and exit handlers find it there as
usual. This file imports nothing but the standard library: the script's process stays as it would be without us. The
error is written in the JSON format of torch.distributed.elastic, to the file that `TORCHELASTIC_ERROR_FILE` names.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from traceback import StackSummary
    from types import CodeType, FrameType, TracebackType
    from typing import Any

__all__ = ("PARENT_VARIABLE", "LastHook", "failure_fingerprint", "folded", "follow_parent", "main")

PARENT_VARIABLE = "ACCEL_LAUNCHER_PID"
"""Number of the process that started this one, so that it can tell whether that one has died already."""

_ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_OUR_PACKAGES = frozenset(
    f"accel_{name}" for name in ("state", "ops", "data", "bigmodel", "tracking", "plugins", "cli", "torch")
) | {"accelerate"}
# By `accel_state.hang_report.rank_status` and `accel_state.run_status.stacks`, which look for these.
_STATUS_FOLDER_VARIABLE = "ACCEL_STATUS_FOLDER"
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK")
_SET_PARENT_DEATH_SIGNAL = 1
_KILL = 9
_MOST_SAMPLES = 64
_LONGEST_SAMPLE = 100
_LONGEST_CHAIN = 8
_LONGEST_CAUSE = 1000


def main() -> None:
    """Run what the arguments name."""
    how, target, *arguments = sys.argv[1:]
    # The folder of this file came first; nothing may be imported from there by accident.
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    follow_parent()
    _show_stack_when_asked()
    if how == "program":
        _replace(target, arguments)
    _prepare_streams()
    last_hook = LastHook()
    sys.argv = [target, *arguments]
    try:
        code, names = _load_module(target) if how == "module" else _load_script(target)
        _execute(code, names)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        error.__traceback__ = _without_own_frames(error.__traceback__)
        last_hook.ended_with(error)
    else:
        return
    # Only here the error and what its frames hold has been let go.
    sys.exit(1)


class LastHook:
    """The end of the chain of `sys.excepthook`: leaves the traceback to the launcher, which shows it once and last.

    A hook that somebody installs later, such as torch's for process groups or a prettier one, comes first, and passes
    on to this one or shows the error by itself.
    """

    def __init__(self) -> None:
        self._default = sys.excepthook
        self._pid = os.getpid()
        self._reached = False
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """As the interpreter calls it; a forked process shows its own errors, and an interrupt is nobody's error."""
        if os.getpid() != self._pid:
            self._default(kind, error, trace)
        elif kind is not KeyboardInterrupt:
            self._reached = True

    def ended_with(self, error: BaseException) -> None:
        """Let the hooks see an error that ended the script, and record it for the launcher."""
        sys.excepthook(type(error), error, error.__traceback__)
        if os.getpid() != self._pid:
            return
        # Hooks may wait for the user, so the launcher hears of the error after them.
        shows_itself = not self._reached or _will_be_restarted()
        recorded = _record(error, shows_itself)
        if self._reached and (shows_itself or not recorded):
            self._default(type(error), error, error.__traceback__)


def _will_be_restarted() -> bool:
    """Whether torch.distributed.run starts the processes again, so that nobody shows this attempt's error later."""
    limit, count = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return int(count) < int(limit)


def follow_parent() -> None:
    """Die with the process that started this one (Linux), however that one ends."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent or not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, _KILL)
    if os.getppid() != int(parent):
        os._exit(128 + _KILL)


def _show_stack_when_asked() -> None:
    """Leave a file that says which process this is, and write the stacks of its threads there at SIGURG.

    No other signal is ignored by a process that has no handler for it, and is used by nobody: a program that takes this
    process over gets none of its handlers.
    """
    folder = os.environ.get(_STATUS_FOLDER_VARIABLE)
    if not folder:
        return
    import faulthandler
    import signal

    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    try:
        path = os.path.join(folder, f"rank{rank}.{os.getpid()}.stack")
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.register(signal.SIGURG, file)
    except (OSError, AttributeError):
        # Another machine, as under mpirun, or a system without that signal.
        return


def _record(error: BaseException, shown: bool) -> bool:
    """Write the error file; whether that worked."""
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
    # Ranks that this process waited for, by `accel_state.hang_report.report`: its error follows from theirs.
    extra["missed"] = getattr(error, "_accel_missed", [])
    try:
        extra["fingerprint"] = failure_fingerprint(error)
    except Exception:
        # Attributes of an error run code of the script's.
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
    """What tells whether two failures are the same one: see `accel_cli.launch.restarts.Fingerprint`."""
    progress = getattr(sys.modules.get("accel_state.hang_report.rank_status"), "PROGRESS", None)
    chain = _chain(error)
    frames = [frame for one in chain for frame in _frames(one.__traceback__)]
    places = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in _lines(chain[0].__traceback__)]
    own = [place for place in places if _is_of_the_script(place[0])]
    path, line, name = (own or places or [("", 0, "")])[-1]
    samples = _samples_of(frames)
    if not samples and progress is not None:
        samples = progress.samples(_read_by_workers(frames))
    return {
        "type": f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
        "frame": f"{path}:{line} in {name}" if path else "",
        "step": progress.run_step if progress is not None else 0,
        "samples": samples[:_MOST_SAMPLES],
        "causes": [
            {
                "types": [base.__qualname__ for base in type(one).__mro__[:-2]],
                "errno": getattr(one, "errno", None) if isinstance(one, OSError) else None,
                "text": str(one)[:_LONGEST_CAUSE],
            }
            for one in chain
        ],
    }


def _chain(error: BaseException) -> list[BaseException]:
    """The error and those that it followed from, the newest first."""
    chain, left = [error], error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while left is not None and len(chain) < _LONGEST_CHAIN and left not in chain:
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
    """Ids of the samples that a loader was reading when an error came: one, or those of its batch."""
    fetch = os.path.join("torch", "utils", "data", "_utils", "fetch.py")
    reading = [frame.f_locals for frame in frames if frame.f_code.co_filename.endswith(fetch)]
    read: object = None
    for names in reading:
        read = names.get("possibly_batched_index", read)
    for names in reading:
        # The frame of a comprehension up to Python 3.11, and since then that of `fetch`.
        read = names.get("idx", read)
    seeded = any(type(getattr(names.get("self"), "dataset", None)).__name__ == "SeededSamples" for names in reading)
    batch = [] if read is None else read if isinstance(read, list) else [read]
    return [str(index[-1] if seeded and isinstance(index, tuple) else index)[:_LONGEST_SAMPLE] for index in batch]


def _read_by_workers(frames: list[FrameType]) -> int | None:
    """Number of the batch whose reading failed in a DataLoader worker; None where the error came from elsewhere."""
    loader = os.path.join("torch", "utils", "data", "dataloader.py")
    for frame in frames:
        if frame.f_code.co_name == "_process_data" and frame.f_code.co_filename.endswith(loader):
            return int(frame.f_locals["self"]._rcvd_idx) - 1
    return None


def folded(error: BaseException) -> str:
    """The traceback of an error as Python shows it, with one line for each run of our own frames.

    Where our code raised something else than one of its typed errors, which is a fault of ours, that frame stays.
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


def _prepare_streams() -> None:
    """Whole lines at once, since processes share the terminal; a crash in native code shows its Python lines."""
    import faulthandler
    import io

    if isinstance(sys.stdout, io.TextIOWrapper):
        # torch.distributed.run starts Python unbuffered, so that a line would be written in pieces.
        sys.stdout.reconfigure(line_buffering=True, write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
    try:
        faulthandler.enable()
    except (OSError, RuntimeError, ValueError, AttributeError):
        # There is no standard error to write to.
        pass


def _replace(program: str, arguments: list[str]) -> None:
    """Let a program that is not Python take this process over."""
    try:
        os.execvp(program, [program, *arguments])
    except OSError as error:
        print(f"accel launch: {program} could not be started: {error}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _load_script(target: str) -> tuple[CodeType, dict[str, object]]:
    """Code and names of `__main__` for a path: a file, or a folder or zip file with a `__main__` module."""
    from importlib import machinery

    # As the interpreter does it: made absolute, and not otherwise tidied up.
    path = os.path.join(os.getcwd(), target)
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        sys.path.insert(0, path)
        spec = machinery.PathFinder.find_spec("__main__", [path])
        if spec is None:
            raise ImportError(f"can't find '__main__' module in {path!r}")
        return _from_spec(spec)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    loader = machinery.SourceFileLoader("__main__", path)
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    return code, {"__file__": path, "__loader__": loader, "__package__": None, "__spec__": None, "__cached__": None}


def _load_module(target: str) -> tuple[CodeType, dict[str, object]]:
    """Code and names of `__main__` for a module, or for the `__main__` module of a package."""
    import importlib.util

    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    spec = importlib.util.find_spec(target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(target + ".__main__")
    if spec is None:
        raise ModuleNotFoundError(f"No module named {target}", name=target)
    code, names = _from_spec(spec)
    sys.argv[0] = str(spec.origin)
    return code, names


def _from_spec(spec: ModuleSpec) -> tuple[CodeType, dict[str, object]]:
    code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    if code is None:
        raise ImportError(f"No code object available for {spec.name}", name=spec.name)
    names = {"__file__": spec.origin, "__loader__": spec.loader, "__package__": spec.parent, "__spec__": spec}
    return code, {**names, "__cached__": spec.cached}


def _execute(code: CodeType, names: dict[str, object]) -> None:
    """Run code as `__main__`, whose dictionary this file's own `__main__` gives up."""
    namespace = sys.modules["__main__"].__dict__
    kept = [(name, namespace[name]) for name in ("__builtins__", "__annotations__") if name in namespace]
    namespace.clear()
    namespace.update(kept)
    namespace.update({"__name__": "__main__", "__doc__": None, **names})
    exec(code, namespace)


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the script's first frame on."""
    importlib = os.path.join(os.path.dirname(os.__file__), "importlib", "")
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if filename != __file__ and not filename.startswith(("<frozen importlib", "<frozen zipimport", importlib)):
            return trace
        trace = trace.tb_next
    return None


if __name__ == "__main__":
    # The functions run from a second copy of this module: the dictionary of this one becomes the script's.
    from importlib.machinery import SourceFileLoader

    _copy = type(sys)("accel_cli.launch.runner")
    _copy.__file__ = __file__
    SourceFileLoader(_copy.__name__, __file__).exec_module(_copy)
    _copy.main()
