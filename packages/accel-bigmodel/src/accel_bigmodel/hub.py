"""Finds checkpoints by their identifier on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from accel_state.errors import SettingError
from accel_state.settings.installed import Requirement

__all__ = ("local_checkpoint",)

_HUB = Requirement("huggingface_hub", distribution="huggingface-hub")
_IDENTIFIER = re.compile(r"[\w.-]+/[\w.-]+")


def local_checkpoint(checkpoint: str | os.PathLike[str]) -> Path:
    """Return an existing path unchanged; else the snapshot of "org/name", downloaded if it is not in the cache.

    If a repository has both formats, only the safetensors files are fetched.

    Raises:
        SettingError: there is no such path, and it is not an identifier or cannot be fetched.
        Missing: the name is an identifier, and huggingface_hub is not installed.
    """
    path = Path(checkpoint)
    if path.exists():
        return path
    name = os.fspath(checkpoint)
    failure = f"Cannot load the checkpoint {name!r}."
    if not _IDENTIFIER.fullmatch(name):
        raise SettingError(failure, "There is no such file or folder.", "Check the spelling of the path.")
    _HUB.demand(f"{failure} No such path exists, and a repository on the Hub needs huggingface_hub.")
    import huggingface_hub

    download: Any = huggingface_hub.snapshot_download
    try:
        folder = Path(download(name, allow_patterns=["*.safetensors", "*.safetensors.index.json"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(download(name, allow_patterns=["*.bin", "*.bin.index.json"]))
    except Exception as error:
        raise SettingError(
            failure,
            f"It is not a local path, and the Hub reports: {type(error).__name__}: {error}",
            "Check the name and the network connection.",
        ) from error
    return folder
