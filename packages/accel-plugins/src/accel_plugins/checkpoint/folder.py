"""The contents of one checkpoint folder: what is written into it, by whom, and how it is read back.

This module knows nothing of commits: it fills a folder that exists and reads one that is there.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from accel_ops import rng
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.capture import capture
from accel_plugins.checkpoint.contents import Contents, LoadHook, SaveHook, Saver, Stateful
from accel_plugins.checkpoint.files import (
    MANIFEST_NAME,
    RNG_STATE_NAME,
    SCALER_NAME,
    custom_name,
    loader_name,
    random_states_name,
)
from accel_plugins.layers import strategy_model
from accel_plugins.manifest import Part
from accel_state.current import Process
from accel_state.errors import AccelError, CheckpointError

__all__ = ("Contents", "load_folder", "save_folder")

logger = logging.getLogger(__name__)

_RANDOM_STATES: Final = re.compile(rf"{RNG_STATE_NAME}_(\d+)\.pkl")


def save_folder(
    folder: str | os.PathLike[str],
    contents: Contents,
    strategy: Saver,
    process: Process,
    *,
    step: int = 0,
    safe_serialization: bool = True,
    save_on_each_node: bool = False,
    hooks: Sequence[SaveHook] = (),
    in_window: bool = False,
) -> None:
    """Write everything into a folder that exists; called on every process.

    Args:
        folder: where to write.
        contents: what to write.
        strategy: knows how models, optimizers and schedulers are written.
        process: who this process is; the first of all writes what is equal on all.
        step: count of steps that is handed back by `load_folder`.
        safe_serialization: safetensors for weights; False writes with `torch.save`.
        save_on_each_node: let the first process of each node write what the first of all writes.
        hooks: called with (models, collected weights, folder) before writing; weights they take away are not written.
        in_window: inside an accumulation window, whose gradients belong to the checkpoint.

    Raises:
        CheckpointError: something cannot be written.
    """
    taken = capture(
        contents,
        strategy,
        process,
        folder=Path(folder),
        step=step,
        save_on_each_node=save_on_each_node,
        hooks=hooks,
        in_window=in_window,
    )
    taken.write(Path(folder), strategy, safe_serialization=safe_serialization)


def load_folder(
    folder: str | os.PathLike[str],
    contents: Contents,
    strategy: Saver,
    process: Process,
    *,
    map_location: Any = "cpu",
    model_options: dict[str, Any] | None = None,
    trusted: bool = False,
    waive: Collection[str] = (),
    hooks: Sequence[LoadHook] = (),
) -> int:
    """Read everything back; called on every process. Random generators come last, so loading does not move them.

    Args:
        folder: a checkpoint.
        contents: the objects to load into, in the order they were saved in.
        strategy: knows how models, optimizers and schedulers are read.
        process: who this process is.
        map_location: where tensors are read to before they go to where the objects have theirs.
        model_options: for `Module.load_state_dict`.
        trusted: let registered objects be read from any pickle, which may run code that the file brings.
        waive: what may be missing: "random_states", "scaler", "loaders", "custom".
        hooks: called with (models, folder) before anything is read; models they take away are not read.

    Returns:
        The step given to `save_folder`.

    Raises:
        CheckpointError: something is missing, damaged, or belongs to other objects.
    """
    source = Path(folder)
    models = list(contents.models)
    for hook in hooks:
        hook(models, str(source))
    for part in strategy.load_order:
        options = dict(model_options or {}) if part is Part.MODEL else {}
        if part is Part.OPTIMIZER:
            options["models"] = [strategy.unwrap(model) for model in contents.for_strategy(Part.MODEL)]
        items = [strategy_model(model) for model in models] if part is Part.MODEL else contents.of_kind(part)
        for index, item in enumerate(items):
            with _fitting(source, item):
                strategy.load(part, item, source, index, map_location=map_location, **options)
    _load_loaders(source, contents.loaders, process, "loaders" in waive)
    _load_scaler(source, contents.scaler, "scaler" in waive)
    _load_custom(source, contents.custom, trusted, "custom" in waive)
    with _fitting(source, "the random generators"):
        return _load_random_states(source, process, "random_states" in waive)


@contextmanager
def _fitting(folder: Path, item: object) -> Iterator[None]:
    """Say of what an object could not be restored, where its state was read and is not one of such an object."""
    try:
        yield
    except (AccelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        what = item if isinstance(item, str) else f"the state of {type(item).__name__}"
        raise CheckpointError(
            f"Cannot restore {what} from {folder}.",
            f"What was saved does not fit: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            "Load an older checkpoint, or build the objects as they were when it was saved.",
        ) from error


def _load_loaders(folder: Path, loaders: Sequence[Any], process: Process, waived: bool) -> None:
    for index, loader in enumerate(loaders):
        path = folder / loader_name(index)
        if not path.is_file() and (waived or _never_saved(folder, loader)):
            continue
        ranks_saved = 1 + len(list(folder.glob(loader_name(index, 1).replace("_rank1", "_rank*"))))
        same_world = ranks_saved == process.world_size
        own = folder / loader_name(index, process.rank if same_world else 0)
        with _fitting(folder, loader):
            loader.load_state_dict(pickled.read(own))


def _never_saved(folder: Path, loader: Any) -> bool:
    """Whether a missing position is harmless: the original library saves one only for a loader that restores it."""
    foreign = not (folder / MANIFEST_NAME).is_file()
    if not foreign or getattr(loader, "restores", True):
        return False
    logger.warning("%s holds no position of a loader; an epoch of random order begins with a new one.", folder)
    return True


def _load_scaler(folder: Path, scaler: Stateful | None, waived: bool) -> None:
    if scaler is None or not scaler.state_dict():
        return
    path = folder / SCALER_NAME
    if not (waived and not path.is_file()):
        with _fitting(folder, scaler):
            scaler.load_state_dict(pickled.read(path))


def _load_custom(folder: Path, custom: Sequence[Any], trusted: bool, waived: bool) -> None:
    saved = len(list(folder.glob(custom_name(0).replace("_0", "_[0-9]*"))))
    if saved != len(custom) and not waived:
        raise CheckpointError(
            f"Cannot load {len(custom)} registered objects from {folder}.",
            f"It holds {saved}.",
            "Register the same objects in the same order as when it was saved, or waive 'custom'.",
        )
    for index, item in enumerate(custom[:saved]):
        with _fitting(folder, item):
            item.load_state_dict(pickled.read(folder / custom_name(index), trusted=trusted))


def _load_random_states(folder: Path, process: Process, waived: bool) -> int:
    path = folder / random_states_name(process.rank)
    ranks = sorted(int(found[1]) for file in folder.iterdir() if (found := _RANDOM_STATES.fullmatch(file.name)))
    if not waived and (process.rank not in ranks or ranks[-1] >= process.world_size):
        raise CheckpointError(
            f"Cannot restore the generators of process {process.rank} of {process.world_size} from {folder}.",
            f"It holds {', '.join(map(random_states_name, ranks)) or 'none'}, so other processes saved it.",
            "Resume with as many processes as saved it, or waive 'random_states' to go on with other random numbers.",
        )
    if process.rank not in ranks:
        return int(pickled.read(folder / random_states_name(ranks[0]))["step"]) if ranks else 0
    states = dict(pickled.read(path))
    step = int(states.pop("step", 0))
    missing = rng.restore(states)
    if missing and not waived:
        raise CheckpointError(
            f"Cannot restore the random generators of process {process.rank} from {path}.",
            f"It has no state of {', '.join(missing)}.",
            "Resume on the kind of device that saved it, or waive 'random_states' to go on with other random numbers.",
        )
    return step
