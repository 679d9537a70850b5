"""FSDP2 with CPU offload on a device: shards and their optimizer state stay on the host, everything else on the device.

The groups of the simulated device refuse tensors of the host, as NCCL does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_bigmodel import load_checkpoint_in_model
from accel_ops.dtensors import full_tensor
from accel_testing.plugin import SIMULATED, working_on
from accel_testing.processes import Processes
from accel_testing.simulated_device import MODULE, POSSIBLE
from accel_torch import Accelerator, FullyShardedDataParallelPlugin

pytestmark = pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have the simulated device here")

Options = dict[str, Any]
TASKS: list[Options] = [
    {"state_dict_type": "FULL_STATE_DICT"},
    {"state_dict_type": "SHARDED_STATE_DICT"},
    {"state_dict_type": "FULL_STATE_DICT", "in_shards": True, "ignored_modules": "head"},
    {"state_dict_type": "SHARDED_STATE_DICT", "in_shards": True},
    {"state_dict_type": "FULL_STATE_DICT", "cpu_ram_efficient_loading": True},
    {"state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": True, "ignored_modules": "head"},
]


class Net(nn.Module):
    """Has buffers of both kinds, and sizes that two processes cannot divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 3)
        self.register_buffer("table", torch.rand(4))
        self.register_buffer("fleeting", torch.rand(2), persistent=False)


class Run:
    """A prepared model and its optimizer on the simulated device."""

    def __init__(self, in_shards: bool = False, offload: bool = True, **options: Any) -> None:
        plugin = FullyShardedDataParallelPlugin(2, cpu_offload=offload, auto_wrap_policy="NO_WRAP", **options)
        self.accelerator = Accelerator(fsdp_plugin=plugin)
        torch.manual_seed(0)
        self.plain = Net()
        torch.manual_seed(self.accelerator.process_index)
        if in_shards:
            with self.accelerator.init_module():
                model = Net()
        else:
            model = Net()
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1))

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        assert norm is not None
        elements = sum(parameter.numel() for parameter in self.plain.parameters())
        torch.testing.assert_close(norm.item(), elements**0.5)
        self.accelerator.clip_grad_value_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """All weights and buffers, on the first process; others have none."""
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}

    def check_places(self) -> None:
        for name, parameter in self.model.named_parameters():
            states = [value for value in self.optimizer.state[parameter].values() if value.dim()]
            for tensor in (parameter, *states):
                assert isinstance(tensor, DTensor) is isinstance(parameter, DTensor)
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                kind = "cpu" if isinstance(parameter, DTensor) else SIMULATED
                assert (tensor.device.type, local.device.type) == (kind, kind), name
        assert {buffer.device.type for buffer in self.model.buffers()} == {SIMULATED}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def on_simulated(body: Callable[..., None], *arguments: Any, **options: Any) -> None:
    with working_on(SIMULATED):
        body(Run(**options), *arguments)


def first_weights(run: Run) -> None:
    run.check_places()
    weights = run.weights()
    assert not weights or equal(weights, dict(run.plain.state_dict()))
    for name, buffer in run.plain.named_buffers():
        assert torch.equal(run.model.get_buffer(name).cpu(), buffer)
    for name, parameter in run.plain.named_parameters():
        own = run.model.get_parameter(name)
        if isinstance(own, DTensor):
            assert full_tensor(own).device.type == SIMULATED
            assert torch.equal(full_tensor(own).cpu(), parameter)


def start(options: Options) -> None:
    on_simulated(first_weights, **options)


@pytest.mark.parametrize("options", TASKS)
def test_a_model_begins_with_the_weights_of_the_first_process(two: Processes, options: Options) -> None:
    two.run(start, options)


def save_and_load(run: Run, folder: str, behind: bool) -> None:
    run.step()
    run.check_places()
    saved = run.weights()
    run.accelerator.save_state(folder, async_save=behind)
    run.step()
    run.accelerator.wait_for_checkpoint()
    continued = run.weights()
    assert not saved or not equal(saved, continued)
    run.accelerator.load_state(folder)
    run.check_places()
    assert equal(run.weights(), saved)
    # The moments of the optimizer were loaded too.
    run.step()
    assert equal(run.weights(), continued)


def resume(options: Options, folder: str, behind: bool) -> None:
    on_simulated(save_and_load, folder, behind, **options)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("options", TASKS)
def test_a_checkpoint_is_loaded_to_where_everything_was(
    two: Processes, tmp_path: Any, options: Options, behind: bool
) -> None:
    two.run(resume, options, str(tmp_path / "checkpoint"), behind)


def load_full_weights(run: Run, folder: str) -> None:
    run.accelerator.save_model(run.model, folder)
    saved = run.weights()
    run.step()
    load_checkpoint_in_model(run.model, folder)
    run.check_places()
    assert equal(run.weights(), saved)
    zeros = {name: torch.zeros_like(value) for name, value in run.plain.state_dict().items()}
    run.accelerator.load_weights(run.model, zeros)
    run.check_places()
    weights = run.weights()
    assert not weights or equal(weights, zeros)


def load_full(options: Options, folder: str) -> None:
    on_simulated(load_full_weights, folder, **options)


@pytest.mark.parametrize("options", TASKS)
def test_full_weights_are_loaded_to_where_the_parameters_are(two: Processes, tmp_path: Any, options: Options) -> None:
    two.run(load_full, options, str(tmp_path))


def memory_of_a_save(folder: str) -> int:
    with working_on(SIMULATED):
        run = Run(offload=False, state_dict_type="SHARDED_STATE_DICT")
        run.step()
        before = MODULE.memory_allocated()
        run.accelerator.save_state(folder, async_save=True)
        taken = MODULE.memory_allocated() - before
        run.accelerator.wait_for_checkpoint()
        return taken


def test_a_save_in_the_background_copies_shards_to_the_host(two: Processes, tmp_path: Any) -> None:
    assert two.run(memory_of_a_save, str(tmp_path / "checkpoint")) == [0, 0]
