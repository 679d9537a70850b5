"""Loading everything back."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_ops.agreement import StoreBarrier
from accel_plugins.checkpoint.state import load_folder, load_gradients
from accel_state.errors import CheckpointError, UnknownKind
from accel_torch.checkpoints import chosen, contents, unwrapped
from accel_torch.saving import wait

if TYPE_CHECKING:
    from accel_torch.parts import Parts

__all__ = ("load_state",)


def load_state(
    parts: Parts, input_dir: str | os.PathLike[str] | None, options: dict[str, Any], missing_ok: bool = False
) -> str | None:
    """Read a checkpoint and return its folder, or its URL; called on every process.

    Raises:
        SettingError: no folder was given and naming is not automatic.
        CheckpointError: it cannot be trusted or does not fit.
    """
    project, process = parts._options.project, parts.state._process
    asked = "Cannot load a checkpoint." if input_dir is None else f"Cannot load the checkpoint {os.fspath(input_dir)}."
    barrier = StoreBarrier(process, "load", asked, project.deadline, CheckpointError)
    with ExitStack() as stack:
        with barrier.reporting():
            wait(parts)
            found = chosen(parts, barrier, input_dir, missing_ok, stack)
            if found is not None:
                _load(parts, found.folder, dict(options))
        barrier.wait("read", last=True)
    return None if found is None else found.place


def _load(parts: Parts, folder: Path, options: dict[str, Any]) -> None:
    map_location = _place(parts, options.pop("map_location", None))
    allow_missing = options.pop("allow_missing", ())
    trusted = not options.pop("weights_only", True)
    parts._accumulation.step = load_folder(
        folder,
        contents(parts),
        parts._engine.strategy,
        parts.state._process,
        map_location=map_location,
        model_options=options,
        trusted=trusted,
        allow_missing=allow_missing,
        hooks=list(parts._registry.load_hooks.values()),
    )
    load_gradients(unwrapped(parts), folder, parts.state.process_index)


def _place(parts: Parts, asked: Any) -> Any:
    """Where tensors are read to, before they go to where the objects have theirs."""
    places = {None: "cpu", "cpu": "cpu", "on_device": parts.state.device}
    if not isinstance(asked, (str, type(None))) or asked not in places:
        raise UnknownKind(
            f"Cannot load a state with map_location={asked!r}.",
            "It can be 'cpu' or 'on_device'.",
            "Remove it: tensors move to the device of the prepared objects.",
        )
    return places[asked]
