from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from accel_bigmodel import fallback_allocate, get_module_size_with_ties
from accel_bigmodel.sizes import compute_module_sizes
from accel_state.errors import SettingError


def layers() -> tuple[list[tuple[str, nn.Module]], dict[str, int]]:
    model = nn.Sequential()
    model.large, model.small = nn.Linear(10, 10), nn.Linear(4, 4)
    model.two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return list(model.named_children()), compute_module_sizes(model)


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
    name, module, rest = fallback_allocate(*layers(), limit, whole)
    assert (name, [other for other, _ in rest]) == (found, left)
    assert (module is None) == (found is None)


def test_modules_that_share_weights_count_together() -> None:
    modules, sizes = layers()
    ties = [["small.weight", "two.0.weight"]]
    # 80 bytes, and 120 of the other without the shared 64.
    assert get_module_size_with_ties(["two.0.weight"], 80, sizes, modules)[:2] == (136, ["two"])
    assert get_module_size_with_ties([], 80, sizes, modules) == (80, [], [])
    assert fallback_allocate(modules, sizes, 100, None, ties)[0] == "two.0"
    with pytest.raises(SettingError, match=r"'nowhere\.weight'"):
        get_module_size_with_ties(["nowhere.weight"], 80, sizes, modules)
