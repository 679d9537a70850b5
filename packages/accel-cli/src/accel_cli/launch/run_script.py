"""Runs a script in a process of the run as `python script.py` would, and records its error for the launcher.

The script runs in the real `__main__`, so that pickling, spawned processes, threads and exit handlers work as usual.
This file imports only a few modules of the standard library, so that the script's process is the same as without the
launcher, and starts as fast.
"""

from __future__ import annotations

import os
import sys

# This is the class of `importlib.machinery`, which would import further modules.
from _frozen_importlib_external import SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType, TracebackType

__all__ = ("PARENT_VARIABLE", "STATUS_FOLDER_VARIABLE", "LastHook", "follow_parent", "main")

PARENT_VARIABLE = "ACCEL_LAUNCHER_PID"
"""Process id of the parent, so that this process can tell whether the parent has already died."""

# `accel_state.watch.status` and `accel_state.watch.stacks` search for these names.
STATUS_FOLDER_VARIABLE = "ACCEL_STATUS_FOLDER"
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK")
_SET_PARENT_DEATH_SIGNAL = 1
_KILL_SIGNAL = 9


def main() -> None:
    """Run the script that the arguments select."""
    how, target, *arguments = sys.argv[1:]
    # Python puts the folder of this file first; nothing must be imported from there by accident.
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
    # Only at this point the error and the objects of its frames have been freed.
    sys.exit(1)


class LastHook:
    """The last hook of `sys.excepthook`: prints nothing, because the launcher prints the traceback once, at the end.

    A hook that is installed later, such as torch's for process groups, runs first, and calls this one or prints the
    error itself.
    """

    def __init__(self) -> None:
        self._default = sys.excepthook
        self._pid = os.getpid()
        self._reached = False
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Handle an uncaught error; a forked process prints its own errors, and an interrupt is not an error."""
        if os.getpid() != self._pid:
            self._default(kind, error, trace)
        elif kind is not KeyboardInterrupt:
            self._reached = True

    def ended_with(self, error: BaseException) -> None:
        """Call the hooks with the error that ended the script, and record it for the launcher."""
        sys.excepthook(type(error), error, error.__traceback__)
        if os.getpid() != self._pid:
            return
        # Hooks may wait for the user, so the error is recorded after them.
        shows_itself = not self._reached or _will_be_restarted()
        recorded = _failure_record().record_error(error, shows_itself)
        if self._reached and (shows_itself or not recorded):
            self._default(type(error), error, error.__traceback__)


def _failure_record() -> ModuleType:
    """Load the module in this folder by its path, because the script may have changed the import path."""
    path = os.path.join(os.path.dirname(__file__), "failure_record.py")
    module = type(sys)("accel_cli.launch.failure_record")
    module.__file__ = path
    SourceFileLoader(module.__name__, path).exec_module(module)
    return module


def _will_be_restarted() -> bool:
    """Whether torch.distributed.run restarts the processes, so that no one else prints the error of this attempt."""
    limit, count = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return int(count) < int(limit)


def follow_parent() -> None:
    """End with the parent process (on Linux), however it ends."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent or not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, _KILL_SIGNAL)
    if os.getppid() != int(parent):
        os._exit(128 + _KILL_SIGNAL)


def _show_stack_when_asked() -> None:
    """Create a file that identifies this process; at SIGURG, the stacks of its threads are written there.

    SIGURG is the only unused signal that a process without a handler ignores: a program that replaces this process does
    not inherit its handlers.
    """
    folder = os.environ.get(STATUS_FOLDER_VARIABLE)
    if not folder:
        return
    import faulthandler

    # Numbers as in the module `signal`, which is slow to import because it creates enums.
    from _signal import SIGURG  # type: ignore[import-not-found, unused-ignore]

    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), "0")
    try:
        path = os.path.join(folder, f"rank{rank}.{os.getpid()}.stack")
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.register(SIGURG, file)
    except (OSError, AttributeError):
        # This may be another machine, as with mpirun, or a system without this signal.
        return


def _prepare_streams() -> None:
    """Write whole lines at once, because processes share the terminal; print the stack after a native crash."""
    import faulthandler
    import io

    if isinstance(sys.stdout, io.TextIOWrapper):
        # torch.distributed.run starts Python unbuffered, which would write a line in parts.
        sys.stdout.reconfigure(line_buffering=True, write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
    try:
        faulthandler.enable()
    except (OSError, RuntimeError, ValueError, AttributeError):
        # Standard error is closed.
        pass


def _replace(program: str, arguments: list[str]) -> None:
    """Replace this process by a program that is not Python."""
    try:
        os.execvp(program, [program, *arguments])
    except OSError as error:
        # `accel_state.untrusted.printable` is not imported here.
        shown = program if program.isprintable() else ascii(program)
        print(f"accel launch: Cannot start {shown}: {error}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _load_script(target: str) -> tuple[CodeType, dict[str, object]]:
    """Code and names of `__main__` for a path: a file, or a folder or zip file with a `__main__` module."""
    # Made absolute and not normalised, as the interpreter does.
    path = os.path.join(os.getcwd(), target)
    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        from importlib import machinery

        sys.path.insert(0, path)
        spec = machinery.PathFinder.find_spec("__main__", [path])
        if spec is None:
            raise ImportError(f"can't find '__main__' module in {path!r}")
        return _from_spec(spec)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    loader = SourceFileLoader("__main__", path)
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
    """Run code as `__main__`, in the dictionary of this program's own `__main__`."""
    namespace = sys.modules["__main__"].__dict__
    kept = [(name, namespace[name]) for name in ("__builtins__", "__annotations__") if name in namespace]
    namespace.clear()
    namespace.update(kept)
    namespace.update({"__name__": "__main__", "__doc__": None, **names})
    exec(code, namespace)


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback from the script's first frame on."""
    importlib = os.path.join(os.path.dirname(os.__file__), "importlib", "")
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if filename != __file__ and not filename.startswith(("<frozen importlib", "<frozen zipimport", importlib)):
            return trace
        trace = trace.tb_next
    return None
