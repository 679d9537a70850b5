"""Where a user's config file lies, as constants."""

from __future__ import annotations

import os
from typing import Final

from accel_cli.config.location import default_path

__all__ = (
    "cache_dir",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "hf_cache_home",
)

default_config_file: Final = default_path(os.environ)

default_yaml_config_file: Final = default_config_file

default_json_config_file: Final = default_config_file

cache_dir: Final = os.path.dirname(default_config_file)

hf_cache_home: Final = os.path.dirname(cache_dir)
