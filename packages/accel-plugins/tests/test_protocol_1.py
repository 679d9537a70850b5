"""A backend that was written for version 1 of the interface runs through the adapter."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Hashable
from typing import Any, ClassVar

import pytest
import torch

from accel_plugins import Context, Manifest, Part, Strategy, Traits
from accel_plugins.precision import Precision
from accel_plugins.resolve import build, strategy_class
from accel_state import current
from accel_state.errors import PluginError
from accel_state.gradient import GradientState

pytestmark = pytest.mark.usefixtures("cpu_state")


class OfVersion1(Strategy):
    """Overrides what version 1 called otherwise."""

    saves_together: ClassVar[bool] = True
    gives_partial_gradients: ClassVar[bool] = False
    load_order: ClassVar[tuple[Part, ...]] = (Part.OPTIMIZER, Part.MODEL)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.calls: list[Any] = []

    def before_gradients_are_read(self, optimizer: Any) -> None:
        super().before_gradients_are_read(optimizer)  # type: ignore[misc]
        self.calls.append(optimizer)

    def part_held(self) -> Hashable:
        return "a third"

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:  # type: ignore[override]
        self.calls.append(kwargs)
        super().backward(loss, **kwargs)


class Inherits(Strategy):
    """Overrides nothing."""


MANIFEST = Manifest(name="old", strategy="test_protocol_1:OfVersion1")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the manifest lead to this module."""
    monkeypatch.setitem(sys.modules, "test_protocol_1", sys.modules[__name__])


def built(manifest: Manifest = MANIFEST) -> Any:
    return build(manifest, None, Context(current.process(), GradientState(), Precision()))


def test_a_manifest_that_declares_no_protocol_was_written_for_version_1() -> None:
    assert MANIFEST.common_protocol == 1
    assert dataclasses.replace(MANIFEST, protocol=2).common_protocol == 2
    assert dataclasses.replace(MANIFEST, protocol=(1, 5)).common_protocol == 2
    assert dataclasses.replace(MANIFEST, protocol=(3, 5)).common_protocol is None
    with pytest.raises(PluginError, match="newer than the second"):
        dataclasses.replace(MANIFEST, protocol=(2, 1))


def test_class_attributes_of_version_1_become_traits() -> None:
    assert built().traits == Traits(
        collective_save=True, can_checkpoint_partial_grads=False, load_order=(Part.OPTIMIZER, Part.MODEL)
    )
    assert built(dataclasses.replace(MANIFEST, strategy="test_protocol_1:Inherits")).traits == Traits()


def test_methods_of_version_1_answer_under_the_names_of_version_2() -> None:
    strategy = built()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])

    strategy.finalize_gradients(optimizer)
    strategy.backward(weight.sum(), torch.nn.Linear(1, 1), retain_graph=True)

    assert isinstance(strategy, OfVersion1)
    assert strategy.shard_key() == "a third"
    assert strategy.calls == [optimizer, {"retain_graph": True}]
    assert weight.grad is not None


def test_what_a_strategy_of_version_1_leaves_out_has_the_usual_answer() -> None:
    strategy = built(dataclasses.replace(MANIFEST, strategy="test_protocol_1:Inherits"))

    strategy.finalize_gradients(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    assert strategy.shard_key() is None


def test_a_strategy_of_version_2_stays_as_it_is() -> None:
    assert strategy_class(dataclasses.replace(MANIFEST, protocol=2)) is OfVersion1
