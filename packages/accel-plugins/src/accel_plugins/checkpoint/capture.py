"""What one process puts into a checkpoint, taken at one moment and written afterwards.

Taking and writing are apart so that training can go on in between, once the tensors are copied (`checkpoint.snapshot`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from accel_bigmodel.weight_files import save_weights_file
from accel_ops import rng
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.contents import Contents, SaveHook, Saver
from accel_plugins.checkpoint.files import SCALER_NAME, custom_name, gradients_name, loader_name, random_states_name
from accel_plugins.checkpoint.gradients import held_gradients
from accel_plugins.manifest import Part
from accel_state.current import Process

__all__ = ("Captured", "capture")

Written = Callable[[Path], None]


@dataclass
class Captured:
    """The states of one process; tensors may be the living ones.

    Attributes:
        objects: by kind, of models, optimizers and schedulers, in order; empty where another process writes them.
        files: whatever else is written, by file name.
        gradients: of an unfinished accumulation window, by file name.
    """

    objects: dict[Part, list[Any]] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def write(
        self,
        folder: Path,
        strategy: Saver,
        *,
        safe_serialization: bool = True,
        written: Written | None = None,
        model_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Write everything into a folder that exists; on every process.

        Args:
            folder: where to write.
            strategy: knows how models, optimizers and schedulers are written.
            safe_serialization: safetensors for weights; False writes with `torch.save`.
            written: called with each file that is complete, so that it can be flushed while the next is written.
            model_options: further ones of the strategy for models, of its `save_options`.

        Raises:
            CheckpointError: something cannot be written.
        """
        before = set(folder.iterdir())
        for part, states in self.objects.items():
            options = dict(model_options or {}) if part is Part.MODEL else {}
            for index, state in enumerate(states):
                strategy.save(part, state, folder, index, safe_serialization=safe_serialization, **options)
                if written is not None and not strategy.saves_together:
                    before = _tell_new(folder, before, written)
        for name, tensors in self.gradients.items():
            save_weights_file(tensors, folder / name)
        for name, state in self.files.items():
            pickled.write(state, folder / name)


def _tell_new(folder: Path, before: set[Path], written: Written) -> set[Path]:
    now = {path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")}
    for path in sorted(now - before):
        written(path)
    return now | before


def capture(
    contents: Contents,
    strategy: Saver,
    process: Process,
    *,
    folder: Path,
    step: int = 0,
    save_on_each_node: bool = False,
    hooks: Sequence[SaveHook] = (),
    in_window: bool = False,
) -> Captured:
    """Take the states of everything that this process writes; called on every process.

    Args:
        contents: what a checkpoint holds.
        strategy: knows the states of models, optimizers and schedulers.
        process: who this process is; the first of all writes what is equal on all.
        folder: path that hooks receive; files that they write there become part of the checkpoint.
        step: count of steps that is handed back when it is loaded.
        save_on_each_node: let the first process of each node write what the first of all writes.
        hooks: called with (models, collected weights, folder); weights they take away are not written.
        in_window: inside an accumulation window, whose gradients belong to the checkpoint.
    """
    writes = process.topology.is_local_main if save_on_each_node else process.rank == 0
    collected = {
        part: [strategy.collect(part, item) for item in contents.for_strategy(part)] for part in strategy.save_order
    }
    shown: list[Any] = [] if strategy.saves_together else collected.get(Part.MODEL, [])
    for hook in hooks:
        hook(contents.models, shown, str(folder))
    taken = Captured(collected if writes or strategy.saves_together else {})
    if in_window:
        models = [strategy.unwrap(model) for model in contents.for_strategy(Part.MODEL)]
        taken.gradients[gradients_name(process.rank)] = held_gradients(models)
    taken.files.update(_equal(contents) if writes else {})
    taken.files.update(_own(contents, process.rank, step))
    return taken


def _equal(contents: Contents) -> dict[str, Any]:
    """What is the same on all processes."""
    scale = contents.scaler.state_dict() if contents.scaler is not None else {}
    custom = {custom_name(index): item.state_dict() for index, item in enumerate(contents.custom)}
    return {**({SCALER_NAME: scale} if scale else {}), **custom}


def _own(contents: Contents, rank: int, step: int) -> dict[str, Any]:
    """What each process has for itself; generators last, so that nothing before moves them."""
    loaders = {loader_name(index, rank): loader.state_dict() for index, loader in enumerate(contents.loaders)}
    return {**loaders, random_states_name(rank): {"step": step, **rng.snapshot()}}
