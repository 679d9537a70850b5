"""`accel to-fsdp2` converts what version 1 says into what version 2 understands, and loses no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_cli.commands.convert import current_key
from accel_plugins.fsdp.conversion import CONVERSION
from accel_state.errors import SettingError
from accel_testing.processes import Finished


def convert(config: dict[str, Any]) -> Any:
    return CONVERSION.convert(config, current_key)


Accel = Callable[..., Finished]

OLD = """
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_use_orig_params: true
mixed_precision: bf16
num_processes: 2
"""

# What the original command writes for it.
NEW = {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_version": 2,
    },
    "mixed_precision": "bf16",
    "num_processes": 2,
}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.yaml"
    path.write_text(OLD, encoding="utf-8")
    return path


def test_a_file_of_version_1_becomes_one_of_version_2(accel: Accel, old: Path, tmp_path: Path) -> None:
    done = accel("to-fsdp2", "--config_file", old, "--output-file", tmp_path / "new.yaml")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((tmp_path / "new.yaml").read_text(encoding="utf-8")) == NEW
    assert old.read_text(encoding="utf-8") == OLD
    for gone in ("fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params"):
        assert f"{gone} is removed" in done.stderr


def test_the_launcher_reads_what_was_written(accel: Accel, old: Path, tmp_path: Path) -> None:
    accel("to-fsdp2", "--config_file", old, "--overwrite")
    shown = accel("explain", "--json", "--config_file", old).stdout
    assert '"fsdp_config.fsdp_version"' in shown
    assert accel("to-fsdp2", "--config_file", old, "--overwrite").stdout.startswith(
        f"{old} is already for FSDP version 2"
    )


@pytest.mark.parametrize(
    ("strategy", "reshards"),
    [
        ("FULL_SHARD", True),
        ("full_shard", True),
        ("SHARD_GRAD_OP", False),
        ("NO_SHARD", False),
        ("HYBRID_SHARD", True),
        ("HYBRID_SHARD_ZERO2", False),
        (1, True),
        ("2", False),
        (3, False),
        (4, True),
        (5, False),
    ],
)
def test_every_sharding_strategy_has_its_counterpart(strategy: Any, reshards: bool) -> None:
    converted = convert({"fsdp_config": {"fsdp_sharding_strategy": strategy}})
    assert converted.values == {"fsdp_config": {"fsdp_reshard_after_forward": reshards, "fsdp_version": 2}}


def test_what_the_mesh_does_in_version_2_is_told() -> None:
    assert "parallelism_config" in convert({"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}).notes[0]
    assert "does not exist" in convert({"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}).notes[0]


def test_keys_without_their_prefix_and_unknown_ones_are_kept() -> None:
    converted = CONVERSION.convert(
        {"fsdp_config": {"offload_params": True, "fsdp_mine": 3, "fsdp_reshard_after_forward": False}}, current_key
    )
    assert converted.values is not None
    assert converted.values["fsdp_config"] == {
        "fsdp_offload_params": True,
        "fsdp_mine": 3,
        "fsdp_reshard_after_forward": False,
        "fsdp_version": 2,
    }


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"mixed_precision": "bf16"}, "no section 'fsdp_config'"),
        ({"fsdp_config": {}}, "no section 'fsdp_config'"),
        ({"fsdp_config": {"fsdp_sharding_strategy": "HALF_SHARD"}}, "No such sharding strategy"),
        ({"fsdp_config": {"fsdp_sharding_strategy": 6}}, "No such sharding strategy"),
        ({"fsdp_config": {"fsdp_sharding_strategy": ""}}, "No such sharding strategy"),
    ],
)
def test_what_cannot_be_converted_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        convert(config)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "No output file is specified"),
        (["--output_file", "there.yaml"], "already exists"),
    ],
)
def test_no_file_is_overwritten_without_being_told_to(
    accel: Accel, old: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "there.yaml").write_text("mine: 1\n", encoding="utf-8")
    done = accel("to-fsdp2", "--config_file", old, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert (tmp_path / "there.yaml").read_text(encoding="utf-8") == "mine: 1\n"
    assert old.read_text(encoding="utf-8") == OLD


@pytest.mark.parametrize("text", ["fsdp_config: [", "- a\n"])
def test_a_broken_or_missing_file_is_refused(accel: Accel, tmp_path: Path, text: str) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(text, encoding="utf-8")
    for path in (broken, tmp_path / "nothing.yaml"):
        done = accel("to-fsdp2", "--config_file", path, "--overwrite")
        assert done.returncode == 2
        assert path.name in done.stderr
        assert "Traceback" not in done.stderr
