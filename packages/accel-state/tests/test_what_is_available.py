"""What is installed and what is there, told without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from accel_state import availability
from accel_state.devices import nvidia, select
from accel_state.devices.cuda import CUDA, check_cuda_fp8_capability
from accel_state.devices.select import get_current_device_type
from accel_state.errors import Missing, NotOffered, SettingError
from accel_state.settings import versions
from accel_state.settings.probe import _found
from accel_state.settings.versions import compare_versions, installed_version
from accel_state.testing.fresh import fresh
from accel_state.testing.simulated_device import NAME, POSSIBLE, simulated_device
from accel_state.topology import Topology

simulated = pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have a device written in Python")

QUESTIONS = {name: getattr(availability, name) for name in availability.__all__ if name.startswith("is_")}

# Questions that a library of their own answers, with the name it is imported by.
LIBRARIES = {
    "is_boto3_available": "boto3",
    "is_datasets_available": "datasets",
    "is_deepspeed_available": "deepspeed",
    "is_lomo_available": "lomo_optim",
    "is_matplotlib_available": "matplotlib",
    "is_pandas_available": "pandas",
    "is_pytest_available": "pytest",
    "is_tqdm_available": "tqdm",
    "is_transformers_available": "transformers",
    "is_wandb_available": "wandb",
}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with fresh():
        yield
    _found.cache_clear()
    installed_version.cache_clear()


@pytest.mark.parametrize("name", sorted(QUESTIONS))
def test_every_question_has_a_plain_answer(name: str) -> None:
    assert QUESTIONS[name]() in (True, False)
    assert inspect.getdoc(QUESTIONS[name])


@pytest.mark.parametrize("name", sorted(LIBRARIES))
def test_a_library_is_available_when_it_can_be_imported(name: str) -> None:
    assert QUESTIONS[name]() is (importlib.util.find_spec(LIBRARIES[name]) is not None)


def install(folder: Path, module: str, distribution: str, version: str) -> None:
    (folder / f"{module}.py").write_text("raise RuntimeError('was imported')")
    metadata = folder / f"{distribution}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("question", "module", "old", "new"),
    [
        (availability.is_torchdata_stateful_dataloader_available, "torchdata", "0.7.1", "0.8.0"),
        (availability.is_4bit_bnb_available, "bitsandbytes", "0.38.1", "0.39.0"),
        (lambda: availability.is_bnb_available("0.50"), "bitsandbytes", "0.49", "0.50"),
    ],
)
@pytest.mark.parametrize("fits", [False, True])
def test_a_library_that_is_too_old_is_not_available(
    question: Callable[[], bool],
    module: str,
    old: str,
    new: str,
    fits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if importlib.util.find_spec(module) is not None:
        pytest.skip("the real one is installed")
    install(tmp_path, module, module, new if fits else old)
    monkeypatch.syspath_prepend(str(tmp_path))
    _found.cache_clear()
    installed_version.cache_clear()
    assert question() is fits
    assert module not in sys.modules


def test_devices_are_asked_of_their_family(monkeypatch: pytest.MonkeyPatch) -> None:
    family = select.family_of("npu")
    monkeypatch.setattr(family, "present", lambda: True)
    monkeypatch.setattr(family, "count", lambda: 0)
    assert availability.is_npu_available()
    assert not availability.is_npu_available(check_device=True)
    assert availability.is_cuda_available() is torch.cuda.is_available()


@simulated
def test_number_formats_are_asked_of_the_family_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_device():
        assert availability.is_bf16_available()
        monkeypatch.setattr(select.best_family(), "supports", lambda dtype: dtype is torch.float16)
        assert not availability.is_bf16_available()
        assert availability.is_fp16_available()
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        assert availability.is_bf16_available()


def test_torch_xla_of_one_kind() -> None:
    with pytest.raises(SettingError, match="devices of one kind"):
        availability.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_torch_xla_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert availability.USE_TORCH_XLA is True
    monkeypatch.setenv("USE_TORCH_XLA", "0")
    assert availability.USE_TORCH_XLA is False
    assert not availability.is_torch_xla_available()
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = availability.no_such_name


def test_a_function_that_needs_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    @availability.torchao_required
    def quantize(model: str) -> str:
        return model

    if not availability.is_torchao_available():
        with pytest.raises(Missing, match="torchao"):
            quantize("m")
    monkeypatch.setattr("accel_state.settings.requirement.Requirement.obstacle", lambda self: None)
    assert quantize("m") == "m"


@simulated
def test_the_device_that_is_taken() -> None:
    expected = select.best_family()
    assert get_current_device_type() == (expected.name, expected.label.value)
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


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int, driver: str) -> None:
    """Put a program on the path that answers as the driver's does."""
    program = folder / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        f'case "$1" in *name*) line="{name}";; *driver*) line="{driver}";; esac\n'
        f'for _ in $(seq {count}); do echo "$line"; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for the driver's program is a shell script")
@pytest.mark.parametrize(
    ("name", "count", "driver", "direct"),
    [
        ("NVIDIA GeForce RTX 4090", 2, "535.104.05", False),
        ("NVIDIA GeForce RTX 4090", 2, "550.40.07", True),
        ("NVIDIA GeForce RTX 4090", 1, "535.104.05", True),
        ("NVIDIA A100-SXM4-80GB", 8, "535.104.05", True),
    ],
)
def test_what_the_driver_tells(
    name: str, count: int, driver: str, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, name, count, driver)
    assert nvidia.get_gpu_info() == ([name] * count, count)
    assert nvidia.get_driver_version() == driver
    assert nvidia.check_cuda_p2p_ib_support() is direct


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for the driver's program is a shell script")
def test_several_processes_on_gpus_that_cannot_reach_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, "NVIDIA GeForce RTX 4090", 2, "535.104.05")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    two = Topology(rank=0, world_size=2, local_world_size=2)
    CUDA().settle(Topology())
    with pytest.raises(NotOffered, match="NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1"):
        CUDA().settle(two)
    for variable in nvidia.WITHOUT_P2P:
        monkeypatch.setenv(variable, "1")
    CUDA().settle(two)


def test_a_machine_without_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia.get_gpu_info() == ([], 0)
    assert nvidia.check_cuda_p2p_ib_support()
    with pytest.raises(NotOffered, match="Install the driver"):
        nvidia.get_driver_version()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_computes_with_8_bits() -> None:
    assert check_cuda_fp8_capability() is False
    result: Any = availability.is_transformer_engine_mxfp8_available()
    assert result is False
