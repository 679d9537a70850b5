"""What AcceleratorState keeps of the engines' configurations, whose classes it does not know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from accel_state import AcceleratorState, PartialState
from accel_state.errors import NoState, NotOffered, NotReady, SettingError
from accel_state.labels import DistributedType

pytestmark = pytest.mark.usefixtures("fresh_state")


@dataclass
class Sharding:
    """A configuration as another package would define it."""

    fsdp_version: int = 1


@dataclass
class Engine:
    """A configuration of which one of several is in use."""

    stage: int
    selected: bool = False

    def select(self, _from_accelerator_state: bool = False) -> None:
        self.selected = _from_accelerator_state

    def deselect(self) -> None:
        self.selected = False


@dataclass
class Telling(Engine):
    """One that does something of its own when it is selected."""

    told: list[Any] = field(default_factory=list)

    def select(self, _from_accelerator_state: bool = False) -> None:
        self.told.append(_from_accelerator_state)


def test_a_run_without_configurations_has_none() -> None:
    state = AcceleratorState(cpu=True)
    assert state.dynamo_plugin is None
    assert state.torch_tp_plugin is None
    for name in ("fsdp_plugin", "megatron_lm_plugin"):
        assert not hasattr(state, name)
        assert name not in AcceleratorState._shared_state
        with pytest.raises(NoState, match=f"without a {name}"):
            getattr(state, name)
    assert state.deepspeed_plugins is None
    assert state.deepspeed_plugin is None
    assert not state.is_fsdp2
    with pytest.raises(NotReady, match="without DeepSpeed"):
        state.get_deepspeed_plugin("student")
    with pytest.raises(NotReady, match="without DeepSpeed"):
        state.select_deepspeed_plugin("student")


@pytest.mark.parametrize("name", ["dynamo_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin"])
def test_the_state_returns_the_configuration_object_that_was_passed(name: str) -> None:
    given: dict[str, Any] = {name: Sharding()}
    equal: dict[str, Any] = {name: Sharding()}
    other: dict[str, Any] = {name: Sharding(2)}
    state = AcceleratorState(cpu=True, **given)
    assert getattr(state, name) is given[name]
    assert getattr(AcceleratorState(**equal), name) is given[name]
    assert AcceleratorState._shared_state[name] is given[name]
    with pytest.raises(NotOffered, match=name):
        AcceleratorState(**other)


@pytest.mark.parametrize("version", [1, 2])
def test_is_fsdp2_reads_the_version_of_the_configuration(version: int) -> None:
    assert AcceleratorState(cpu=True, fsdp_plugin=Sharding(version)).is_fsdp2 is (version == 2)


def test_a_plugin_for_a_run_that_exists_is_refused() -> None:
    AcceleratorState(cpu=True, _from_accelerator=True)
    with pytest.raises(NotOffered, match="fsdp_plugin=None"):
        AcceleratorState(fsdp_plugin=Sharding())


def test_one_deepspeed_configuration_is_in_use_without_being_selected() -> None:
    only = Engine(stage=2)
    state = AcceleratorState(cpu=True, deepspeed_plugin=only)
    assert state.deepspeed_plugin is only
    assert state.deepspeed_plugins == {"default": only}


def test_one_of_several_deepspeed_configurations_is_selected() -> None:
    student, teacher = Engine(stage=2, selected=True), Telling(stage=3)
    state = AcceleratorState(cpu=True, deepspeed_plugin={"student": student, "teacher": teacher})
    assert state.deepspeed_plugin is student
    assert state.get_deepspeed_plugin("teacher") is teacher

    state.select_deepspeed_plugin("teacher")
    assert AcceleratorState().deepspeed_plugin is teacher
    assert teacher.told == [True]
    assert not student.selected

    state.select_deepspeed_plugin("student")
    assert AcceleratorState().deepspeed_plugin is student
    assert student.selected
    assert not teacher.selected


def test_deepspeed_configurations_that_are_assigned_need_not_have_the_selected_name() -> None:
    state = AcceleratorState(cpu=True, deepspeed_plugin={"student": Engine(stage=2), "teacher": Engine(stage=3)})
    state.select_deepspeed_plugin("teacher")
    other = Engine(stage=1)
    state.deepspeed_plugin = {"other": other}
    assert AcceleratorState().deepspeed_plugin is other


@pytest.mark.parametrize("name", ["techer", None])
def test_an_unknown_deepspeed_configuration_changes_nothing(name: str | None) -> None:
    student, teacher = Engine(stage=2, selected=True), Engine(stage=3)
    state = AcceleratorState(cpu=True, deepspeed_plugin={"student": student, "teacher": teacher})
    with pytest.raises(SettingError, match="'student', 'teacher'"):
        state.select_deepspeed_plugin(name)
    assert state.deepspeed_plugin is student
    assert student.selected


def test_distributed_type_can_be_assigned() -> None:
    state = AcceleratorState(cpu=True)
    state.distributed_type = "FSDP"
    assert AcceleratorState().distributed_type is DistributedType.FSDP
    state.distributed_type = DistributedType.NO
    assert AcceleratorState().distributed_type is DistributedType.NO
    with pytest.raises(SettingError, match="no such distributed type"):
        state.distributed_type = "PARALLEL"
    assert state.distributed_type is DistributedType.NO


@pytest.mark.parametrize(
    "name", ["device", "num_processes", "is_main_process", "mixed_precision", "distributed_type", "fsdp_plugin"]
)
def test_a_state_that_was_reset_has_no_attributes(name: str) -> None:
    state, process = AcceleratorState(cpu=True), PartialState()
    AcceleratorState._reset_state(True)
    assert not hasattr(state, name)
    assert getattr(process, name, "none") == "none"
    with pytest.raises(NotReady, match=rf"AcceleratorState. object has no attribute '{name}'(?s:.)*_reset_state"):
        getattr(state, name)
    with pytest.raises(AttributeError, match="'PartialState' object has no attribute 'nothing'"):
        process.nothing  # noqa: B018
