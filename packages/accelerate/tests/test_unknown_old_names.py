"""What is not there: the error says what to use in its place, however the name was asked for."""

from __future__ import annotations

import importlib

import pytest

import accelerate.utils
from accel_state.errors import AccelError, Missing


def test_an_attribute_that_never_existed() -> None:
    with pytest.raises(AttributeError) as caught:
        _ = accelerate.utils.gatherr  # type: ignore[attr-defined]
    assert isinstance(caught.value, AccelError)
    assert "Cannot import 'gatherr' from 'accelerate.utils'." in str(caught.value)
    assert "Did you mean gather?" in str(caught.value)


def test_an_import_of_a_name_that_never_existed() -> None:
    with pytest.raises(ImportError, match="Did you mean Accelerator"):
        from accelerate import Acelerator  # type: ignore[attr-defined]  # noqa: F401


def test_a_name_that_is_somewhere_else() -> None:
    with pytest.raises(ImportError, match=r"Import it from accelerate\.state"):
        from accelerate import AcceleratorState  # type: ignore[attr-defined]  # noqa: F401


def test_a_name_that_was_removed() -> None:
    with pytest.raises(ImportError) as caught:
        from accelerate.utils import is_tpu_available  # type: ignore[attr-defined]  # noqa: F401
    assert isinstance(caught.value, Missing)
    assert "It was removed before 1.15.0." in str(caught.value)
    assert "is_torch_xla_available" in str(caught.value)


@pytest.mark.parametrize("name", ["gatherr", "is_tpu_available", "__wrapped__"])
def test_asking_first_is_safe(name: str) -> None:
    assert not hasattr(accelerate.utils, name)
    assert getattr(accelerate.utils, name, None) is None


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("accelerate.test_utils", "accel_testing"),
        ("accelerate.test_utils.testing", "accel_testing"),
        ("accelerate.kwargs_handlers", "accelerate.utils"),
        ("accelerate.deepspeed_utils", "accelerate.utils"),
        ("accelerate.checkpointing", "save_state"),
        ("accelerate.commands.menu", "accelerate config"),
        ("accelerate.commands.menu.helpers", "accelerate config"),
        ("accelerate.commands.config.cluster", "write_basic_config"),
    ],
)
def test_a_module_that_is_not_provided(module: str, remedy: str) -> None:
    with pytest.raises(Missing, match=remedy):
        importlib.import_module(module)


def test_a_module_that_is_not_provided_is_no_attribute() -> None:
    assert not hasattr(accelerate, "test_utils")
    with pytest.raises(Missing, match="accel_testing"):
        from accelerate import test_utils  # noqa: F401


def test_a_module_that_never_existed() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("accelerate.no_such_module")


def test_a_name_missing_in_an_older_package_names_both_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    import accel_ops.tree

    monkeypatch.delattr(accel_ops.tree, "is_namedtuple")
    vars(accelerate.utils).pop("is_namedtuple", None)
    with pytest.raises(AttributeError) as caught:
        _ = accelerate.utils.is_namedtuple
    message = str(caught.value)
    assert "accelerate.utils" in message
    assert "accel_ops.tree" in message
    assert "Install accelerate and accel-ops from wheels of one build" in message
