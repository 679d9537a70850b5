"""Assigning and deleting at an old address reaches our code, and is undone."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

import accel_data.loader
import accel_ops
import accel_ops.collectives
import accel_ops.conversion
import accelerate.accelerator
import accelerate.utils
import accelerate.utils.operations
from accel_testing.fresh import fresh
from accelerate import Accelerator

ADDRESSES = ("accelerate.utils.gather", "accelerate.utils.operations.gather", "accelerate.accelerator.gather")


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("read_before", [False, True])
def test_a_patch_reaches_whoever_calls_it(address: str, read_before: bool) -> None:
    package, _, module = address.rpartition(".")[0].rpartition(".")
    target = getattr(__import__(package, fromlist=[module]), module)
    original = accel_ops.collectives.gather
    vars(target).pop("gather", None)
    if read_before:
        assert target.gather is original
    with fresh():
        accelerator = Accelerator(cpu=True)
        with mock.patch(address, doubled):
            assert accelerate.utils.operations.gather is doubled
            assert accel_ops.gather is doubled
            assert accelerator.gather(torch.ones(1)).item() == 2.0
        assert accelerator.gather(torch.ones(1)).item() == 1.0
    for module in (accel_ops, accel_ops.collectives, accelerate.utils, target):
        assert module.gather is original


def test_a_patch_reaches_modules_that_imported_the_name() -> None:
    original = accel_ops.conversion.send_to_device
    assert accel_data.loader.send_to_device is original
    with mock.patch("accelerate.utils.send_to_device") as stand_in:
        assert accel_data.loader.send_to_device is accel_ops.conversion.send_to_device is stand_in
    assert accel_data.loader.send_to_device is accel_ops.conversion.send_to_device is original


def test_a_patch_stays_out_of_a_package_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ModuleType("accel_mine")
    vars(mine)["send_to_device"] = original = accel_ops.conversion.send_to_device
    monkeypatch.setitem(sys.modules, "accel_mine", mine)
    with mock.patch("accelerate.utils.send_to_device"):
        assert vars(mine)["send_to_device"] is original


def test_the_object_to_patch_can_be_the_module() -> None:
    original = accelerate.utils.operations.find_batch_size
    with mock.patch.object(accelerate.utils.operations, "find_batch_size") as stand_in:
        accelerate.utils.find_batch_size([1])
    stand_in.assert_called_once_with([1])
    assert accelerate.utils.find_batch_size is accelerate.utils.operations.find_batch_size is original


def test_deleting_at_an_old_address_undoes_all_assignments() -> None:
    original = accel_ops.collectives.gather
    module: Any = accelerate.utils
    vars(module).pop("gather", None)
    with pytest.raises(AttributeError):
        del module.gather
    module.gather = doubled
    module.gather = other = mock.Mock()
    assert accel_ops.gather is accelerate.utils.operations.gather is other
    del module.gather
    assert accel_ops.gather is accelerate.utils.operations.gather is module.gather is original


def test_what_is_no_name_of_the_table_stays_in_the_module() -> None:
    module: Any = accelerate.utils
    module.of_mine = 1
    assert vars(module)["of_mine"] == 1
    del module.of_mine
    assert not hasattr(module, "of_mine")
