"""The path of the user's own config file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

__all__ = ("DEFAULT_NAME", "default_path")

DEFAULT_NAME: Final = "default_config.yaml"


def default_path(environ: Mapping[str, str]) -> str:
    """The file that is read when none is named: in the cache folder of the Hugging Face libraries.

    Example:
        >>> default_path({"HF_HOME": "/data/hf"})
        '/data/hf/accelerate/default_config.yaml'
    """
    home = environ.get("HF_HOME")
    if not home:
        home = os.path.join(environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "huggingface")
    return os.path.join(os.path.expanduser(home), "accelerate", DEFAULT_NAME)
