"""What each process of `accel_state.testing.processes` runs: read a call, make it in a clean state, send the answer."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from types import ModuleType
from typing import IO, Any, NoReturn

import torch

from accel_state.settings.environ import publish
from accel_state.testing.fresh import fresh

__all__ = ("serve",)


def _module(name: str, file: str) -> ModuleType:
    """The module of a test file, under the name it has in the parent so that its classes can be pickled."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # pickle imports the outermost package of a module, and that of a test file may exist by name only.
    package = name.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        sys.modules[package] = ModuleType(package)
    spec.loader.exec_module(module)
    return module


def _call(name: str, file: str, function: str, args: tuple[Any, ...], place: dict[str, str]) -> tuple[Any, str | None]:
    """What a function returned, or the traceback of what it raised."""
    with fresh(launched=True):
        try:
            found: Any = _module(name, file)
            for part in function.split("."):
                found = getattr(found, part)
            publish(place)
            return found(*args), None
        except BaseException:
            told = traceback.format_exc()
            _end_reducers()
            return None, told


def _end_reducers() -> None:
    """Free what DistributedDataParallel holds of the process groups, while the groups still stand.

    The frames of an error keep a model until after they have gone. Then its reducer would end their threads while it
    holds the interpreter's lock, for which these threads may be waiting.
    """
    parallel: Any = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None:
        return
    for found in gc.get_objects():
        if issubclass(type(found), parallel.DistributedDataParallel):
            for name in ("logger", "reducer"):
                vars(found).pop(name, None)


def _answer(answers: IO[bytes], value: Any, error: str | None) -> None:
    try:
        text = pickle.dumps((value, error))
    except Exception:
        text = pickle.dumps((None, "The value could not be pickled.\n" + traceback.format_exc()))
    answers.write(text)
    answers.flush()


def _next_call(calls: IO[bytes]) -> Any:
    """What to call, or None where no call follows."""
    try:
        return pickle.load(calls)
    except EOFError:
        return None


def serve(calls_from: int, answers_to: int) -> NoReturn:
    """Serve calls until None comes, or the other end of the pipe is closed.

    Args:
        calls_from: the descriptor that calls are read from.
        answers_to: the descriptor that answers are written to.
    """
    torch.set_num_threads(1)
    # Whoever runs the tests in the background may ignore interrupts, which this process would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Where processes are not forked from this one (Python 3.14 and newer), each would import it anew.
    multiprocessing.set_forkserver_preload(["torch"])
    calls, answers = os.fdopen(calls_from, "rb"), os.fdopen(answers_to, "wb")
    while (call := _next_call(calls)) is not None:
        value, error = _call(*call)
        sys.stdout.flush()
        _answer(answers, value, error)
    # Taking torch down piece by piece would last longer than most calls.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
