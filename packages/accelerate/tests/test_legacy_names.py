"""Names that exist only for older code."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_state.errors import Missing, SettingError
from accel_state.settings.probe import importable
from accel_state.settings.schema import settings_of
from accelerate.utils import constants, imports, modeling


def test_the_lists_of_the_sharding_backend_are_those_that_it_takes() -> None:
    settings = settings_of(FullyShardedDataParallelPlugin)
    for name, listed in {
        "sharding_strategy": constants.FSDP_SHARDING_STRATEGY,
        "auto_wrap_policy": constants.FSDP_AUTO_WRAP_POLICY,
        "backward_prefetch": constants.FSDP_BACKWARD_PREFETCH,
        "state_dict_type": constants.FSDP_STATE_DICT_TYPE,
    }.items():
        assert [settings[name].kind.parse(choice) for choice in listed] == listed


def test_comparisons_by_their_sign() -> None:
    assert constants.STR_OPERATION_TO_FUNC[">="](2, 2)
    assert not constants.STR_OPERATION_TO_FUNC["!="](2, 2)


@pytest.mark.skipif(importable("deepspeed"), reason="DeepSpeed is installed")
def test_a_function_that_needs_deepspeed_names_the_install_line() -> None:
    @imports.deepspeed_required
    def shard() -> None:
        raise AssertionError("must not run")

    with pytest.raises(Missing, match=r"shard\(\) was called.*\n.*\n.*deepspeed"):
        shard()


def layers() -> tuple[list[tuple[str, nn.Module]], dict[str, int]]:
    model = nn.Sequential()
    model.large, model.small = nn.Linear(10, 10), nn.Linear(4, 4)
    model.two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return list(model.named_children()), modeling.compute_module_sizes(model)


@pytest.mark.parametrize(
    ("limit", "whole", "found", "left"),
    [
        (1000, None, "large", ["small", "two"]),
        ("100KB", None, "large", ["small", "two"]),
        (100, None, "small", ["large", "two"]),
        (60, None, "two.1", ["large", "small", "two.0"]),
        (60, ["Sequential"], None, ["large", "small", "two"]),
        (10, None, None, ["large", "small", "two"]),
    ],
)
def test_the_first_module_that_is_small_enough(limit: Any, whole: Any, found: str | None, left: list[str]) -> None:
    name, module, rest = modeling.fallback_allocate(*layers(), limit, whole)
    assert (name, [other for other, _ in rest]) == (found, left)
    assert (module is None) == (found is None)


def test_modules_that_share_weights_count_together() -> None:
    modules, sizes = layers()
    ties = [["small.weight", "two.0.weight"]]
    # 80 bytes, and 120 of the other without the shared 64.
    assert modeling.get_module_size_with_ties(["two.0.weight"], 80, sizes, modules)[:2] == (136, ["two"])
    assert modeling.get_module_size_with_ties([], 80, sizes, modules) == (80, [], [])
    assert modeling.fallback_allocate(modules, sizes, 100, None, ties)[0] == "two.0"
    with pytest.raises(SettingError, match=r"'nowhere\.weight'"):
        modeling.get_module_size_with_ties(["nowhere.weight"], 80, sizes, modules)


def test_a_model_that_is_none_of_peft() -> None:
    assert modeling.is_peft_model(nn.Linear(2, 2)) is False
