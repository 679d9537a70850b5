"""TensorBoard: event files in a folder, written by the `SummaryWriter` of torch or tensorboardX."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_state.settings.installed import Requirement
from accel_tracking.base import LibraryTracker, on_main_process
from accel_tracking.values import as_number, flatten_keys, plain, scalars_as_numbers

__all__ = ("TensorBoardTracker",)

_TENSORBOARD_X = Requirement("tensorboardX")


class _EitherWriter(Requirement):
    """Either torch's writer, which requires tensorboard, or the writer of tensorboardX."""

    def obstacle(self) -> str | None:
        obstacle = super().obstacle()
        return None if obstacle is None or _TENSORBOARD_X.obstacle() is None else obstacle


class TensorBoardTracker(LibraryTracker):
    """Stores a run as event files in `<logging_dir>/<run_name>`.

    Args:
        run_name: name of the run and of its folder.
        logging_dir: parent of that folder.
        kwargs: arguments for `SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True
    requirement = _EitherWriter("tensorboard")

    writer = LibraryTracker.tracker

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir_param = logging_dir
        self.logging_dir = os.path.join(logging_dir, run_name)

    def open(self) -> Any:
        """Open the event file."""
        has_tensorboard = Requirement("tensorboard").obstacle() is None
        module = importlib.import_module("torch.utils.tensorboard" if has_tensorboard else "tensorboardX")
        return module.SummaryWriter(self.logging_dir, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the hyperparameters for the HPARAMS tab, and as `<time>/hparams.yml` beside the event files."""
        flat = flatten_keys(plain(values))
        self.writer.add_hparams(
            {name: value if isinstance(value, (bool, int, float, str)) else str(value) for name, value in flat.items()},
            metric_dict={},
        )
        self.writer.flush()
        folder = Path(self.logging_dir) / str(time.time())
        folder.mkdir(parents=True)
        # Every JSON document is a YAML document, and JSON needs no library.
        (folder / "hparams.yml").write_text(json.dumps(plain(values), indent=2) + "\n", encoding="utf-8")

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers as scalars, text as text, and mappings as scalars in one chart."""
        for name, value in scalars_as_numbers(values).items():
            if isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.add_scalars(name, flatten_keys(value), global_step=step, **kwargs)
            elif (number := as_number(value)) is not None:
                self.writer.add_scalar(name, number, global_step=step, **kwargs)
            else:
                self.writer.add_text(name, str(plain(value)), global_step=step, **kwargs)
        self.writer.flush()

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write batches of images, by default of shape (N, C, H, W); `dataformats="NHWC"` changes the order."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)
        self.writer.flush()

    @on_main_process
    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()
