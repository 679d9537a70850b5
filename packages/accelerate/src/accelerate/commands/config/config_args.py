"""What is found at the old address `accelerate.commands.config.config_args`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.config_classes import BaseConfig, ClusterConfig, SageMakerConfig, load_config_from_file
    from accelerate.legacy.config_files import (
        cache_dir,
        default_config_file,
        default_json_config_file,
        default_yaml_config_file,
        hf_cache_home,
    )

__all__ = (
    "BaseConfig",
    "ClusterConfig",
    "SageMakerConfig",
    "cache_dir",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "hf_cache_home",
    "load_config_from_file",
)

serve(__name__)
