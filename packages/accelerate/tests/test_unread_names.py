"""Names of the original that nothing here reads: replacing one is a warning, reading one an error with a reason."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, Protocol, TypeVar
from unittest import mock

import pytest
import torch

import accelerate.accelerator
import accelerate.data_loader
import accelerate.utils.fsdp_utils
from accel_state.errors import AccelError
from accel_testing.processes import Processes
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.hooks import AlignDevicesHook
from accelerate.local_sgd import LocalSGD
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallelism_config import ParallelismConfig
from accelerate.private_names import UNREAD, Absent, add_descriptors
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import ClearMLTracker
from accelerate.utils import DeepSpeedPlugin, ProfileKwargs

pytestmark = pytest.mark.usefixtures("fresh_state")

REPLACED = [
    (Accelerator, "_prepare_cp", "sequence_sharding"),
    (Accelerator, "_prepare_fsdp2", r"accel_plugins\.fsdp\.fsdp2"),
    (Accelerator, "_prepare_one", "Accelerator.prepare"),
    (Accelerator, "_do_sync", "Accelerator.accumulate"),
    (AcceleratorState, "_mixed_precision", "mixed_precision="),
    (AcceleratorState, "_goes_first", "main_process_first"),
    (PartialState, "_prepare_backend", "accel_state.start"),
    (GradientState, "_dataloader_references_ref", "dataloader_references"),
    (ParallelismConfig, "_validate_accelerator", "the Accelerator checks"),
    (AcceleratedOptimizer, "_switch_parameters", "the strategy"),
    (DataLoaderShard, "_update_state_dict", "accel_data.loader"),
    (DataLoaderDispatcher, "_fetch_batches", "accel_data.dispatch"),
    (LocalSGD, "_sync_and_avg_model_params", "LocalSGD.step"),
    (DeepSpeedPlugin, "_set_selected", "DeepSpeedPlugin.select"),
    (ProfileKwargs, "_get_profiler_activity", "ProfileKwargs.build"),
    (ClearMLTracker, "_get_title_series", "ClearMLTracker.log"),
]
WHERE = [f"{owner.__name__}.{name}" for owner, name, _ in REPLACED]


@contextmanager
def warned(shown: str, remedy: str = "") -> Iterator[None]:
    """One warning, about this file, with the name and what does it here."""
    with pytest.warns(UserWarning, match=rf"^{shown} was replaced: .*{remedy}") as told:
        yield
    assert len(told) == 1
    assert told[0].filename == __file__


def none_warned(create: Callable[[], Any]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        create()
    assert [str(one.message) for one in told] == []


@pytest.mark.parametrize(("owner", "name", "remedy"), REPLACED, ids=WHERE)
def test_a_replaced_method_that_nothing_reads(owner: Any, name: str, remedy: str) -> None:
    with mock.patch.object(owner, name, create=True):
        assert callable(getattr(owner, name))
        with warned(f"{owner.__name__}.{name}", remedy):
            Accelerator(cpu=True)
        # Once told is enough.
        none_warned(lambda: Accelerator(cpu=True))
    assert not hasattr(owner, name)


@pytest.mark.parametrize(("owner", "name", "remedy"), REPLACED, ids=WHERE)
def test_a_subclass_with_a_method_that_nothing_calls(owner: Any, name: str, remedy: str) -> None:
    class Own(owner):
        pass

    setattr(Own, name, None)
    with warned(f"Own.{name}", remedy):
        Accelerator(cpu=True)
    derived = type(owner)("Other", (Own,), {name: None})
    with warned(f"Other.{name}", remedy):
        Accelerator(cpu=True)
    none_warned(lambda: Accelerator(cpu=True))
    assert derived.__base__ is Own


@pytest.mark.parametrize("create", [PartialState, AcceleratorState, GradientState, lambda: Accelerator().prepare(1)])
def test_what_looks_for_replaced_names(create: Callable[[], Any], request: pytest.FixtureRequest) -> None:
    Accelerator(cpu=True)
    own = type(request.node.name, (LocalSGD,), {"_sync_and_avg_model_params": None})
    with pytest.warns(UserWarning, match=re.escape(f"{own.__name__}._sync_and_avg_model_params was replaced")):
        create()


def test_prepare_looks_for_replaced_names() -> None:
    accelerator = Accelerator(cpu=True)

    class Own(AcceleratedOptimizer):
        def _switch_parameters(self) -> None: ...

    plain = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    with warned("Own._switch_parameters"):
        accelerator.prepare(plain)
    none_warned(lambda: accelerator.prepare(plain))
    assert issubclass(Own, AcceleratedOptimizer)


@pytest.mark.parametrize(("owner", "name", "remedy"), REPLACED, ids=WHERE)
def test_a_restored_or_inherited_value(owner: Any, name: str, remedy: str) -> None:
    before = inspect.getattr_static(owner, name)
    with mock.patch.object(owner, name, print, create=True):
        pass
    derived = type("Restored", (owner,), {name: before})
    none_warned(lambda: Accelerator(cpu=True))
    assert not hasattr(derived, name)


class Singleton(type):
    """As many programs write it."""

    made: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if cls not in cls.made:
            cls.made[cls] = super().__call__(*arguments, **options)
        return cls.made[cls]


class Named(Protocol):
    name: str


class Checked(ABC):
    @abstractmethod
    def check(self) -> int: ...


T = TypeVar("T")


class Typed(Generic[T]):
    """Has a type parameter."""


OWNERS = list(dict.fromkeys([*(owner for owner, _, _ in REPLACED), AlignDevicesHook]))


@pytest.mark.parametrize("owner", OWNERS)
def test_subclasses_with_any_metaclass(owner: Any) -> None:
    assert type(owner) is type

    class Single(owner, metaclass=Singleton):
        pass

    class Mine(owner, Checked, Named, Typed[int]):
        pass

    assert type(Single) is Singleton
    assert Mine.__abstractmethods__ == {"check"}


@pytest.mark.parametrize("owner", [Accelerator, PartialState, AcceleratorState])
def test_objects_of_classes_with_a_metaclass(owner: Any) -> None:
    class Single(owner, metaclass=Singleton):
        pass

    class Mine(owner, Checked, Typed[int]):
        def check(self) -> int:
            return self.num_processes  # type: ignore[no-any-return]

    assert Single(cpu=True) is Single()
    assert Mine(cpu=True).check() == Single().num_processes == 1


@pytest.mark.parametrize(("owner", "name", "remedy"), REPLACED, ids=WHERE)
def test_a_private_name_that_is_absent(owner: Any, name: str, remedy: str) -> None:
    assert not hasattr(owner, name)
    with pytest.raises(AttributeError, match="private name of the original") as caught:
        getattr(owner, name)
    assert isinstance(caught.value, AccelError)
    assert caught.value.failure == f"Cannot read {owner.__name__}.{name}."
    assert remedy.replace("\\", "").lower() in caught.value.remedy.lower()


def test_attributes_of_objects() -> None:
    class Mine(Accelerator):
        pass

    accelerator = Mine(cpu=True)
    assert not hasattr(accelerator, "_prepare_cp")
    with pytest.raises(AttributeError, match="sequence_sharding"):
        _ = accelerator._prepare_cp  # type: ignore[attr-defined]
    with warned("Mine._prepare_cp"):
        accelerator._prepare_cp = print  # type: ignore[attr-defined]
    assert accelerator._prepare_cp is print  # type: ignore[attr-defined]
    none_warned(lambda: setattr(accelerator, "_prepare_cp", print))
    del accelerator._prepare_cp  # type: ignore[attr-defined]
    assert not hasattr(accelerator, "_prepare_cp")
    with pytest.raises(AttributeError):
        del accelerator._prepare_cp  # type: ignore[attr-defined]
    with warned("AcceleratorState._check_initialized"):
        accelerator.state._check_initialized = None  # type: ignore[attr-defined]
    plain = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    prepared = accelerator.prepare(plain)
    assert not hasattr(prepared, "_accelerate_step_called")
    with warned("AcceleratedOptimizer._accelerate_step_called"):
        prepared._accelerate_step_called = None


def test_replaced_methods_that_prepare_does_not_call() -> None:
    class Own(Accelerator):
        @functools.wraps(Accelerator.prepare_model)
        def prepare_model(self, model: Any, *arguments: Any, **options: Any) -> Any:
            return super().prepare_model(model)

        prepare_optimizer = Accelerator.prepare_optimizer

    with warned("Own.prepare_model", "does not call it"):
        Own(cpu=True)
    with mock.patch.object(Accelerator, "prepare_data_loader"), warned("Accelerator.prepare_data_loader"):
        Accelerator(cpu=True)
    Accelerator.prepare_scheduler, before = print, Accelerator.prepare_scheduler  # type: ignore[assignment, method-assign]
    Accelerator.prepare_scheduler = before  # type: ignore[method-assign]
    none_warned(lambda: Accelerator(cpu=True))


def test_values_of_packages_whose_names_begin_like_ours() -> None:
    def prepare_model(self: Any, model: Any) -> Any:
        return model

    prepare_model.__module__ = "accel_mycompany.training"
    own = type("OfMyCompany", (Accelerator,), {"prepare_model": prepare_model})
    with warned("OfMyCompany.prepare_model"):
        own(cpu=True)


def test_names_of_a_program_are_its_own() -> None:
    class Own(Accelerator):
        _mine = 1

        def backward(self, loss: torch.Tensor, **options: Any) -> None:
            super().backward(loss, **options)

    Own.more = 2  # type: ignore[attr-defined]
    own = Own(cpu=True)
    own._other = 3  # type: ignore[attr-defined]
    with mock.patch.object(Accelerator, "gather", lambda self, tensor: tensor * 2):
        assert own.gather(torch.ones(1)).item() == 2.0
    none_warned(lambda: Own(cpu=True))


def test_descriptors_do_not_change_what_is_copied() -> None:
    config = ParallelismConfig(dp_shard_size=2)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert not any(isinstance(value, Absent) for value in vars(config).values())


@pytest.mark.parametrize("address", UNREAD)
def test_what_is_listed_exists_or_is_absent(address: str) -> None:
    module, _, name = address.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    add_descriptors()
    for attribute in UNREAD[address]:
        found = vars(owner).get(attribute)
        assert isinstance(found, Absent) if attribute.startswith("_") else callable(getattr(owner, attribute))


# ---------------------------------------------------------------- globals of old modules
def test_libraries_that_old_modules_import_can_be_read() -> None:
    assert accelerate.accelerator.torch is torch  # type: ignore[attr-defined]
    assert accelerate.utils.fsdp_utils.torch is torch  # type: ignore[attr-defined]
    assert accelerate.accelerator.warnings is warnings  # type: ignore[attr-defined]
    assert not hasattr(accelerate, "torch")
    assert not hasattr(accelerate.utils, "torch")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (accelerate.accelerator, "torch"),
        (accelerate.accelerator, "fsdp2_canonicalize_names"),
        (accelerate.accelerator, "_attach_context_parallel_hooks"),
        (accelerate.data_loader, "_PYTORCH_DATALOADER_KWARGS"),
        (accelerate.utils.fsdp_utils, "fsdp2_load_full_state_dict"),
    ],
)
def test_a_replaced_global_that_nothing_reads(module: Any, name: str) -> None:
    before = getattr(module, name, None)
    try:
        with warned(f"{module.__name__}.{name}"):
            setattr(module, name, lambda *arguments: None)
    finally:
        if callable(before):
            setattr(module, name, before)
        else:
            delattr(module, name)
    assert getattr(module, name, None) is before


ACTING: list[tuple[str, Callable[[], Any]]] = [
    ("accelerate.accelerator.convert_model_to_fp8_ao", lambda: importlib.import_module("accel_plugins.precision.fp8")),
    ("accelerate.commands.to_fsdp2.load_config", lambda: importlib.import_module("accelerate.legacy.fsdp2_configs")),
    ("accelerate.commands.estimate.verify_on_hub", lambda: importlib.import_module("accelerate.legacy.estimating")),
    ("accelerate.utils.fsdp_utils.is_compiled_module", lambda: importlib.import_module("accel_plugins.layers")),
]


@pytest.mark.parametrize(("target", "home"), ACTING, ids=[target for target, _ in ACTING])
def test_a_replaced_global_reaches_its_reader(target: str, home: Callable[[], Any]) -> None:
    name = target.rpartition(".")[2]
    with mock.patch(target) as stand_in:
        assert getattr(home(), name) is stand_in
    assert getattr(home(), name) is not stand_in


def sharded_by_a_program(wraps: bool) -> tuple[list[str], bool, list[list[float]]]:
    from torch.distributed.fsdp import fully_shard

    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.accelerator import fsdp2_prepare_model as own

    seen: list[Any] = []

    def replaced(accelerator: Any, model: Any) -> Any:
        seen.append(accelerator)
        if wraps:
            return own(accelerator, model)
        fully_shard(model, mesh=accelerator.torch_device_mesh)
        return model

    trained = []
    with mock.patch("accelerate.accelerator.fsdp2_prepare_model", replaced):
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(2))
        torch.manual_seed(accelerator.process_index)
        plain = torch.nn.Linear(4, 2)
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        if not wraps:
            # The program's function decides what ranks begin with.
            for parameter in model.parameters():
                torch.nn.init.ones_(parameter)
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 4) * (accelerator.process_index + 1)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            trained.append(model.weight.full_tensor().flatten().tolist())
    again = accelerator.prepare(torch.nn.Linear(2, 2))
    return (
        [type(one).__name__ for one in seen],
        all(one is accelerator for one in seen),
        [*trained, [again is not None]],
    )


@pytest.mark.parametrize("wraps", [False, True])
def test_prepare_shards_by_a_replaced_function(two: Processes, wraps: bool) -> None:
    first, second = two.run(sharded_by_a_program, wraps)
    assert first == second
    assert first[0] == ["Accelerator"]
    assert first[1]
    assert first[2][0] != first[2][1]
