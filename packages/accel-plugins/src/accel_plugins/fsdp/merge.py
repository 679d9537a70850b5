"""Putting the shards of a checkpointed model together into one file of weights, without any process group."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torch import Tensor

from accel_bigmodel.weight_files import SAFE_WEIGHTS_NAME, WEIGHTS_NAME, save_weights_file
from accel_plugins.checkpoint.files import FSDP_MODEL_NAME
from accel_plugins.checkpoint.shards import read_whole
from accel_plugins.manifest import Part
from accel_state.errors import CheckpointError, SettingError

__all__ = ("merge_weights", "merged_state")


def merge_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> Path:
    """Write the weights of a sharded checkpoint into one file, and return its path.

    Args:
        checkpoint_dir: a folder of shards such as `pytorch_model_fsdp_0`, or the checkpoint with one such folder.
        output_path: the folder to write to.
        safe_serialization: write `model.safetensors`, else `pytorch_model.bin`.
        remove_checkpoint_dir: remove the folder of shards once the file is written.

    Raises:
        SettingError: there are no shards, or those of several models.
        CheckpointError: they are damaged, or the file could not be written; no shards were removed then.
    """
    shards = _shards_in(Path(checkpoint_dir))
    state = merged_state(shards)
    target = Path(output_path) / (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write merged weights to {target}.", f"The system refused: {error}.", "Name another folder."
        ) from error
    save_weights_file(state, target)
    if remove_checkpoint_dir:
        shutil.rmtree(shards)
    return target


def merged_state(shards: Path) -> dict[str, Tensor]:
    """Whole weights by name from a folder of shards.

    Raises:
        CheckpointError: a shard is missing or damaged.
    """
    state = read_whole(shards)
    # All weights stand below one name in the files.
    root = state.get(Part.MODEL.value)
    return root if len(state) == 1 and isinstance(root, dict) else state


def _shards_in(folder: Path) -> Path:
    asked = f"Cannot merge the shards in {folder}."
    if (folder / ".metadata").is_file():
        return folder
    inside = sorted(path.parent for path in folder.glob(f"{FSDP_MODEL_NAME}_*/.metadata"))
    if len(inside) == 1:
        return inside[0]
    if inside:
        names = ", ".join(path.name for path in inside)
        raise SettingError(asked, f"It holds several models: {names}.", "Name the folder of one of them.")
    obstacle = "It holds no shards (no file .metadata)." if folder.is_dir() else "There is no such folder."
    remedy = f"Name a folder such as {FSDP_MODEL_NAME}_0, which state_dict_type='SHARDED_STATE_DICT' writes."
    raise SettingError(asked, obstacle, remedy)
