"""What is installed and what is there, told without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from accel_state.devices import select
from accel_state.errors import Missing, SettingError
from accel_state.settings import installed
from accel_state.settings.installed import _is_installed, installed_version
from accel_testing.simulated_device import POSSIBLE, simulated_device
from accelerate.legacy import availability
from accelerate.names import owners
from accelerate.utils import imports

simulated = pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have a device written in Python")

QUESTIONS = {name: getattr(imports, name) for name in owners("accelerate.utils.imports") if name.startswith("is_")}

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
def nothing_cached(fresh_state: None) -> Iterator[None]:
    yield
    _is_installed.cache_clear()
    installed_version.cache_clear()


@pytest.mark.parametrize("name", sorted(QUESTIONS))
def test_every_question_has_a_plain_answer(name: str) -> None:
    assert isinstance(QUESTIONS[name](), bool)
    assert inspect.getdoc(QUESTIONS[name])


@pytest.mark.parametrize("name", sorted(LIBRARIES))
def test_a_library_is_available_when_it_can_be_imported(name: str) -> None:
    assert QUESTIONS[name]() is (importlib.util.find_spec(LIBRARIES[name]) is not None)


def test_rich_is_available_where_it_is_installed_and_a_variable_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    assert not availability.is_rich_available()
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "true")
    assert availability.is_rich_available()
    monkeypatch.setattr(installed, "importable", lambda module: module != "rich")
    assert not availability.is_rich_available()


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
    _is_installed.cache_clear()
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
    monkeypatch.setattr("accel_state.settings.installed.Requirement.obstacle", lambda self: None)
    assert quantize("m") == "m"
