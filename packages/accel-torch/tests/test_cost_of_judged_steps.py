"""What judging a step costs: collectives, waits for the device, and passes over gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel_testing.plugin import on_devices
from accel_testing.processes import Processes
from accel_testing.recording_transport import recording
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, GradScalerKwargs, PartialState, StepGuard

pytestmark = pytest.mark.usefixtures("fresh_state")

STEPS = 4


class Operations(TorchDispatchMode):
    """Counts operations by name, and those that bring values of the device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # Its operations on local tensors come here one by one, collectives among them.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        self.names.append(name)
        source = args[1] if name == "aten::copy_" else args[0] if args else None
        leaves = isinstance(source, torch.Tensor) and not source.is_cpu
        arrives = isinstance(result, torch.Tensor) and result.is_cpu
        if leaves and (name == "aten::_local_scalar_dense" or (arrives and name in ("aten::copy_", "aten::_to_copy"))):
            self.waits += 1
        return result


def steps(guard: StepGuard | None, precision: str, clips: bool, fused: bool = False) -> Operations:
    """The operations of steps in one process, after the first ones."""
    handlers: list[Any] = [GradScalerKwargs(init_scale=64.0), *([guard] if guard is not None else [])]
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=handlers)
    model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=fused, foreach=False))
    inputs = torch.ones(2, 4, device=accelerator.device)
    counted = Operations()

    def step() -> None:
        accelerator.backward(model(inputs).square().mean())
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with counted:
        for _ in range(STEPS):
            step()
    return counted


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(("precision", "fused"), [("no", False), ("bf16", False), ("fp16", False), ("fp16", True)])
@on_devices("simulated", differs="waiting for a GPU stops the host until all of its kernels have run")
def test_a_judged_step_waits_once(device: torch.device, precision: str, fused: bool, clips: bool) -> None:
    assert steps(StepGuard(spike=1e6), precision, clips, fused).waits == STEPS


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_are_read_once(clips: bool) -> None:
    def norms(guard: StepGuard | None) -> int:
        names = steps(guard, "no", clips).names
        return sum("norm" in name for name in names)

    plain, guarded = norms(None), norms(StepGuard())
    # A fused norm of all tensors, and the norm of these norms.
    assert guarded == (plain if clips else plain + 2 * STEPS)


def collectives(engine: str, guard: StepGuard | None, clips: bool) -> dict[str, Any]:
    """The collectives of steps on this process: those of torch, and those of the transport with their bytes."""
    PartialState(cpu=True)
    with recording() as records:
        sharded = FullyShardedDataParallelPlugin(fsdp_version=2) if engine == "fsdp2" else None
        accelerator = Accelerator(
            cpu=True, fsdp_plugin=sharded, kwargs_handlers=[guard] if guard else [], check_replicas_every=0
        )
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs = torch.ones(2, 4)

        def step() -> None:
            accelerator.backward(model(inputs).square().mean())
            if clips:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        records.clear()
        # torch's profiler follows the threads of gloo, and has crashed a process in which one ended.
        with Operations() as counted:
            for _ in range(STEPS):
                step()
    return {
        "all": sum("c10d" in name and not name.endswith("::wait_tensor") for name in counted.names),
        "own": [(record.operation, record.nbytes) for record in records],
    }


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_processes_exchange_at_most_one_small_message(two: Processes, engine: str, clips: bool) -> None:
    plain = two.run(collectives, engine, None, clips)
    guarded = two.run(collectives, engine, StepGuard(spike=1e6), clips)
    for one, other in zip(plain, guarded, strict=True):
        assert one["own"] == []
        assert [operation for operation, _ in other["own"]] == ["all_reduce"] * STEPS
        more = other["all"] - one["all"]
        if engine == "fsdp2":
            # The numbers travel with the norm of each of the four parameters.
            assert [nbytes for _, nbytes in other["own"]] == [4 * 4 + 12] * STEPS
            assert more <= (0 if clips else STEPS)
        else:
            assert [nbytes for _, nbytes in other["own"]] == [12] * STEPS
            assert more == STEPS
