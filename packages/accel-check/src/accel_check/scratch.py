"""What a checked script saves goes to a scratch folder, and is read back from there."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from accel_check.recorder import StepRecorder

__all__ = ("Scratch", "deepest_common", "note_other_files", "redirect_saves", "skip_saves")

_WRITING_FLAGS: Final = os.O_WRONLY | os.O_RDWR


class Scratch:
    """The scratch folder of a run, in which every path of the script has a counterpart.

    Args:
        folder: the folder.
        own: folders of the check, whose paths stay as they are.
        saved: called with the path of each file that is written there.
    """

    def __init__(self, folder: str, own: tuple[str, ...], saved: Callable[[str], None]) -> None:
        self.folder, self.saved, self._own = folder, saved, (folder, *own)

    def to_write(self, path: Any) -> str:
        """The path to write instead of one of the script."""
        text: str = os.path.abspath(os.fspath(path))
        if text.startswith(self._own) or _is_library():
            return text
        inside = os.path.join(self.folder, text.lstrip(os.sep))
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        self.saved(inside)
        return inside

    def to_read(self, path: Any) -> Any:
        """The path to read instead of one of the script: the counterpart if it exists."""
        inside = os.path.join(self.folder, os.path.abspath(os.fspath(path)).lstrip(os.sep))
        return inside if os.path.exists(inside) else path


def _is_library() -> bool:
    """Whether our library writes, whose sessions name a folder in the scratch folder themselves."""
    frame = sys._getframe(3)
    return str(frame.f_globals.get("__name__", "")).startswith("accel_")


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def redirect_saves(recorder: StepRecorder) -> Scratch:
    """Redirect `torch.save`, safetensors and `torch.distributed.checkpoint`, until this process ends."""

    def saved(path: str) -> None:
        recorder.facts.more.setdefault("saved", []).append((recorder.calls, path))

    resume = recorder.task.resume
    own = (recorder.task.folder, *([] if resume is None else [resume.checkpoints]))
    scratch = Scratch(recorder.task.scratch, own, saved)
    save, load = torch.save, torch.load

    @functools.wraps(save)
    def save_inside(obj: Any, f: Any, *arguments: Any, **options: Any) -> None:
        save(obj, scratch.to_write(f) if _is_path(f) else f, *arguments, **options)

    @functools.wraps(load)
    def load_inside(f: Any, *arguments: Any, **options: Any) -> Any:
        return load(scratch.to_read(f) if _is_path(f) else f, *arguments, **options)

    torch.save, torch.load = save_inside, load_inside
    _redirect_distributed(scratch)
    _redirect_safetensors(scratch)

    def opened(path: str, listed: bool) -> None:
        recorder.facts.more.setdefault("opened", []).append((recorder.calls, path))
        if listed and path not in recorder.facts.written:
            recorder.facts.written.append(path)

    note_other_files(opened, recorder.script_folder, (*own, recorder.task.scratch))
    return scratch


def skip_saves() -> None:
    """Let nothing be saved, since tensors of a plan have no values, until this process ends."""
    import torch.distributed.checkpoint

    distributed: Any = torch.distributed.checkpoint

    def skipped(*_: Any, **__: Any) -> None:
        return None

    torch.save = skipped
    distributed.save = distributed.async_save = skipped
    if importlib.util.find_spec("safetensors") is not None:
        files = importlib.import_module("safetensors.torch")
        files.save_file = files.save_model = skipped  # type: ignore[attr-defined]


def _redirect_distributed(scratch: Scratch) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

    for kind, change in ((FileSystemWriter, scratch.to_write), (FileSystemReader, scratch.to_read)):
        begin, reset = kind.__init__, kind.reset

        def begun(
            self: Any, path: Any, *arguments: Any, _begin: Any = begin, _change: Any = change, **more: Any
        ) -> None:
            _begin(self, _change(path), *arguments, **more)

        def again(self: Any, checkpoint_id: Any = None, _reset: Any = reset, _change: Any = change) -> None:
            _reset(self, None if checkpoint_id is None else _change(checkpoint_id))

        kind.__init__, kind.reset = begun, again  # type: ignore[method-assign]


def _redirect_safetensors(scratch: Scratch) -> None:
    try:
        import safetensors.torch as files
    except ImportError:
        return
    save, load = files.save_file, files.load_file

    @functools.wraps(save)
    def save_inside(tensors: Any, filename: Any, *arguments: Any, **options: Any) -> None:
        save(tensors, scratch.to_write(filename), *arguments, **options)

    @functools.wraps(load)
    def load_inside(filename: Any, *arguments: Any, **options: Any) -> Any:
        return load(scratch.to_read(filename), *arguments, **options)

    files.save_file, files.load_file = save_inside, load_inside


def note_other_files(opened: Callable[[str, bool], None], script_folder: str, own: tuple[str, ...]) -> None:
    """Follow the other files that the script writes.

    Args:
        opened: called with the path of each, and whether the report lists it.
        script_folder: the folder of the script.
        own: the folders of the check.
    """
    temporary = tempfile.gettempdir()
    outside: tuple[str, ...] = ("/dev", "/proc", "/sys", str(Path.home() / ".cache"))
    if not script_folder.startswith(temporary):
        outside = (*outside, temporary)

    def note(event: str, arguments: Any) -> None:
        if event != "open" or not isinstance(arguments[0], str):
            return
        path, mode, flags = arguments
        path = os.path.abspath(path)
        writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else (flags or 0) & _WRITING_FLAGS
        if writes and not path.startswith(own):
            opened(path, not path.startswith(outside) and "__pycache__" not in path)

    sys.addaudithook(note)


def deepest_common(paths: list[str]) -> str:
    """The file that was written, or the deepest folder that holds all files."""
    unique = sorted(set(paths))
    return unique[0] if len(unique) == 1 else os.path.commonpath(unique)
