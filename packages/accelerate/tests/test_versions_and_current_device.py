"""Versions of libraries, and the device that a run uses by default."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import pytest
import torch
from packaging.version import Version

from accel_state.devices.select import best_family
from accel_state.errors import Missing, SettingError
from accel_state.settings.installed import installed_version
from accel_testing.simulated_device import NAME, POSSIBLE, simulated_device
from accelerate.legacy import versions
from accelerate.utils import compare_versions, is_torch_version
from accelerate.utils.environment import check_cuda_fp8_capability, get_current_device_type

simulated = pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have a device written in Python")


@pytest.fixture(autouse=True)
def no_cached_versions(fresh_state: None) -> Iterator[None]:
    yield
    installed_version.cache_clear()


@simulated
def test_get_current_device_type() -> None:
    expected = best_family()
    assert get_current_device_type() == (expected.name, expected.spec.label.value)
    with simulated_device():
        assert get_current_device_type() == (NAME, "MULTI_GPU")


def test_versions_of_libraries() -> None:
    here = importlib.metadata.version("torch")
    assert compare_versions("torch", ">=", "2.9")
    assert compare_versions(Version("1.5"), "<", "2")
    assert versions.torch_version == Version(here)
    with pytest.raises(Missing, match="pip install no-such-library"):
        compare_versions("no-such-library", ">=", "1")
    with pytest.raises(SettingError, match="=>"):
        compare_versions("torch", "=>", "1")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = versions.no_such_name


def test_local_labels_of_versions_do_not_count() -> None:
    assert compare_versions(Version("2.13.0+cpu"), "==", "2.13.0")
    assert is_torch_version(">=", "2.9")
    with pytest.raises(SettingError, match="=>"):
        compare_versions(Version("1"), "=>", "1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_computes_with_8_bits() -> None:
    assert check_cuda_fp8_capability() is False
