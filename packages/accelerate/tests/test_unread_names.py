"""Replaced names that nothing here reads: a warning says so, once."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import accelerate.accelerator
import accelerate.data_loader
import accelerate.utils.fsdp_utils
from accel_testing.processes import Processes
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

pytestmark = pytest.mark.usefixtures("fresh_state")


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


@pytest.mark.parametrize("name", ["_prepare_cp", "_prepare_fsdp2", "_prepare_one"])
def test_a_replaced_method_that_nothing_reads(name: str) -> None:
    with mock.patch.object(Accelerator, name, create=True):
        with warned(f"Accelerator.{name}", "Accelerator.prepare does this"):
            Accelerator(cpu=True)
        # Once told is enough.
        none_warned(lambda: Accelerator(cpu=True))
    assert not hasattr(Accelerator, name)


def test_a_subclass_with_a_method_that_nothing_calls() -> None:
    class Own(Accelerator):
        def _prepare_tp(self) -> None: ...

    with warned("Own._prepare_tp"):
        Accelerator(cpu=True)
    derived = type("Other", (Own,), {"_prepare_tp": None})
    with warned("Other._prepare_tp"):
        Accelerator(cpu=True)
    none_warned(lambda: Accelerator(cpu=True))
    assert derived.__base__ is Own


@pytest.mark.parametrize("create", [PartialState, AcceleratorState, GradientState, lambda: Accelerator().prepare(1)])
def test_what_looks_for_replaced_names(create: Callable[[], Any], request: pytest.FixtureRequest) -> None:
    Accelerator(cpu=True)
    own = type(request.node.name, (Accelerator,), {"_prepare_te": None})
    with pytest.warns(UserWarning, match="_prepare_te was replaced"):
        create()
    assert own.__base__ is Accelerator


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
