"""One training step of a plan under fake tensors, as one rank of a fake process group runs it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from accel_ops.tree import find_batch_size, recursively_apply
from accel_plugins.blocks import repeated_blocks
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.fsdp2 import divide
from accel_plugins.transforms.activation_checkpoint import ActivationCheckpoint
from accel_plugins.transforms.tensor_parallel import TensorParallel
from accel_state.errors import SettingError
from accel_torch.training_memory import estimating
from accel_torch.training_memory.live_bytes import LiveBytes, MemoryKind

__all__ = (
    "RankMemory",
    "TrainingCase",
    "TrainingPlan",
    "block_names",
    "count_operations",
    "fsdp_settings",
    "measure_plan",
)

_PRECISIONS: Final = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCK: Final = 512
"""Bytes that torch's allocator of an accelerator rounds up to."""

_TORCH: Final = str(Path(torch.__file__).parent)
_OURS: Final = str(Path(__file__).parent)


@dataclass(frozen=True)
class TrainingCase:
    """What is trained.

    Args:
        build: returns the model, the loss function and one example batch of one process. The loss function takes the
            model and a batch and returns a scalar. The samples are along the first dimension of the batch.
        optimizer: makes the optimizer of parameters; `torch.optim.AdamW` when None.
    """

    build: Callable[[], tuple[Module, Callable[[Module, Any], Tensor], Any]]
    optimizer: Callable[..., Optimizer] | None = None


@dataclass(frozen=True)
class TrainingPlan:
    """How a number of processes train.

    Args:
        processes: how many.
        backend: "single", "ddp" or "fsdp2".
        tp: how many processes divide each tensor.
        offload: keep parameters, gradients and optimizer states on the host (fsdp2).
        recompute: compute the activations of the blocks again in backward.
        micro_batch: samples of one forward; those of the example batch when 0.
        accumulation: micro-batches of one step.
        mixed_precision: "no", "bf16" or "fp16".
        device: "cpu", or another one, whose optimizers work on all parameters at once.
    """

    processes: int = 1
    backend: str = "single"
    tp: int = 1
    offload: bool = False
    recompute: bool = False
    micro_batch: int = 0
    accumulation: int = 1
    mixed_precision: str = "no"
    device: str = "cuda"

    @property
    def data_processes(self) -> int:
        """How many processes read different samples."""
        return self.processes // self.tp

    @property
    def name(self) -> str:
        """The plan in a few words."""
        parts = [self.backend] if self.backend != "single" or self.tp == 1 else []
        parts += [f"tp={self.tp}"] if self.tp > 1 else []
        parts += ["offload"] if self.offload else []
        parts += ["recompute"] if self.recompute else []
        return " + ".join(parts)


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds.

    Args:
        rank: its number.
        peak: bytes of its device at the peak.
        parts: bytes at the peak, by what they are for; the host's among them with offload.
        host: bytes that its host holds at most, checkpoint staging not counted.
        staging: bytes of the host that an asynchronous checkpoint copies the state into.
        moved: bytes that collectives read and write in one step.
        copied: bytes that travel between host and device in one step.
    """

    rank: int
    peak: int
    parts: dict[str, int] = field(default_factory=dict)
    host: int = 0
    staging: int = 0
    moved: int = 0
    copied: int = 0


def measure_plan(case: TrainingCase, plan: TrainingPlan, rank: int = 0) -> RankMemory:
    """Run two steps of a plan as one rank and return its memory; the first step makes the optimizer's states.

    Raises:
        SettingError: the model needs the values of tensors, or the plan does not apply to it.
    """
    offloaded = (MemoryKind.PARAMETERS, MemoryKind.GRADIENTS, MemoryKind.OPTIMIZER) if plan.offload else ()
    on_cpu = plan.device == "cpu"
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    live = LiveBytes(mode, offloaded, 1 if on_cpu else _BLOCK, _workspace_on_cpu if on_cpu else None)
    with estimating(), _fake_group(plan.processes, rank), _naming_values():
        # A mesh reads the values of its ranks.
        mesh = init_device_mesh("cpu", (plan.data_processes, plan.tp), mesh_dim_names=("dp_shard", "tp"))
        along_data, along_tensors = mesh["dp_shard"], mesh["tp"]
        with mode, live, torch.random.fork_rng(devices=[]):
            return _Trial(case, plan, mode, live, along_data, along_tensors).run(rank)


def count_operations(case: TrainingCase) -> tuple[Module, Any, float]:
    """The model and the example batch under fake tensors, and the floating-point operations of forward and backward.

    Raises:
        SettingError: the model needs the values of tensors.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with estimating(), _naming_values(), mode, torch.random.fork_rng(devices=[]):
        model, loss_function, batch = case.build()
        model = _in_memory(model)
        batch = recursively_apply(mode.from_tensor, batch)
        with counter:
            loss_function(model, batch).backward()  # type: ignore[no-untyped-call]
    return model, batch, float(counter.get_total_flops())


class _Trial:
    """The objects of one trial."""

    def __init__(
        self,
        case: TrainingCase,
        plan: TrainingPlan,
        mode: FakeTensorMode,
        live: LiveBytes,
        along_data: DeviceMesh,
        along_tensors: DeviceMesh,
    ) -> None:
        self._plan, self._live, self._mode = plan, live, mode
        self._along_data, self._along_tensors = along_data, along_tensors
        self._buckets: list[Tensor] = []
        model, self._loss, batch = case.build()
        self._batch = self._sized(batch)
        self._module = self._prepared(_in_memory(model))
        self._parameters = [one for one in self._module.parameters() if one.requires_grad]
        make = case.optimizer or torch.optim.AdamW
        self._optimizer = make(self._parameters)
        if plan.device != "cpu" and not plan.offload:
            for group in self._optimizer.param_groups:
                if group.get("foreach", True) is None and not group.get("fused"):
                    group["foreach"] = True

    def run(self, rank: int) -> RankMemory:
        """Two steps; the numbers are those of the second, which holds the most."""
        live = self._live
        for tensor in (*self._module.parameters(), *self._module.buffers()):
            live.track(tensor.detach(), MemoryKind.PARAMETERS)
        recursively_apply(lambda leaf: live.track(leaf, MemoryKind.ACTIVATIONS), self._batch)
        live.default = MemoryKind.ACTIVATIONS
        live.after_collective = self._mark_gradients
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._mark_gradient)  # type: ignore[no-untyped-call]
        # It makes the optimizer's states; and DTensor infers shapes with whole tensors, once for each operation.
        self._step()
        live.reset_peak()
        moved = self._step()
        held = sum(one.nbytes for one in map(_local, (*self._module.parameters(), *self._module.buffers())))
        states = sum(one.nbytes for one in map(_local, self._states()))
        copied = 0
        if self._plan.offload:
            held_trained = sum(_local(one).nbytes for one in self._parameters)
            copied = (2 * held + held_trained) * self._plan.accumulation
        parts = {kind.value: size for kind, size in live.at_peak.items()}
        return RankMemory(rank, live.peak, parts, live.host_peak, held + states, moved, copied)

    def _step(self) -> int:
        """One optimizer step, and the bytes that its collectives read and write.

        All micro-batches but the last one hold the same, so that two of them are enough.
        """
        live, first, last = self._live, 0, 0
        for number in range(min(self._plan.accumulation, 2)):
            begun = live.moved
            syncs = number + 1 == min(self._plan.accumulation, 2)
            with self._syncing(syncs):
                with self._autocast():
                    loss = self._loss(self._module, self._batch)
                loss.backward()  # type: ignore[no-untyped-call]
            del loss
            first, last = last, live.moved - begun
        self._mark_gradients()
        if self._plan.offload:
            live.default = MemoryKind.OPTIMIZER
        self._optimizer.step()
        for state in self._states():
            live.track(state, MemoryKind.OPTIMIZER)
        self._optimizer.zero_grad()
        live.default = MemoryKind.ACTIVATIONS
        return first * (self._plan.accumulation - 1) + last

    def _states(self) -> Iterator[Tensor]:
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def _mark_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._live.track(parameter.grad, MemoryKind.GRADIENTS)

    def _mark_gradients(self) -> None:
        for parameter in self._parameters:
            self._mark_gradient(parameter)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _PRECISIONS[self._plan.mixed_precision]
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    @contextmanager
    def _syncing(self, syncs: bool) -> Iterator[None]:
        module = self._module
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(syncs)
        yield
        if syncs:
            self._live.moved += 2 * sum(bucket.nbytes for bucket in self._buckets)

    def _sized(self, batch: Any) -> Any:
        """The batch with the samples of a micro-batch."""
        size = self._plan.micro_batch
        present = find_batch_size(batch)

        def fit(tensor: Tensor) -> Tensor:
            if not size or tensor.ndim == 0 or tensor.shape[0] != present or size == present:
                return self._mode.from_tensor(tensor)
            return torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype, requires_grad=tensor.requires_grad)

        return recursively_apply(fit, batch)

    def _prepared(self, model: Module) -> Module:
        plan, live = self._plan, self._live
        live.default = MemoryKind.COMMUNICATION
        # Neither transform reads the context where it is given a mesh.
        context: Any = None
        if plan.tp > 1:
            model = TensorParallel(mesh=self._along_tensors).apply(model, context)
        if plan.recompute:
            model = ActivationCheckpoint().apply(model, context)
        if plan.backend == "fsdp2":
            divide(model, fsdp_settings(model, plan), self._along_data, False)
        elif plan.backend == "ddp":
            # The wrapper itself reads values. It holds buckets of the size of all gradients from its start to its end.
            self._buckets = [torch.empty_like(one) for one in model.parameters() if one.requires_grad]
        return model


def fsdp_settings(model: Module, plan: TrainingPlan) -> FullyShardedDataParallelPlugin:
    """The settings of FSDP for a plan: the repeated blocks of the model are sharded by themselves."""
    names = block_names(model)
    dtype = _PRECISIONS[plan.mixed_precision]
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP" if names else "NO_WRAP",
        transformer_cls_names_to_wrap=names or None,
        cpu_offload=CPUOffloadPolicy(pin_memory=False) if plan.offload else False,
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype) if dtype else None,
        reshard_after_forward=True,
    )


def block_names(model: Module) -> list[str]:
    """Names of the classes of the blocks that a model repeats."""
    return list(dict.fromkeys(type(block).__name__ for block in repeated_blocks(model)))


def _workspace_on_cpu(name: str, given: list[Tensor], results: list[Tensor]) -> int:
    """Copies that the allocator shows: in another layout for convolutions of oneDNN, of the whole tensor for gloo."""
    if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
        return max(tensor.nbytes for tensor in given)
    if name == "aten::convolution":
        inputs, weight, *_ = given
        return max(inputs.nbytes + weight.nbytes, results[0].nbytes)
    if name == "aten::convolution_backward":
        gradient, inputs, *_ = given
        return gradient.nbytes + inputs.nbytes
    return 0


def _in_memory(model: Module) -> Module:
    """A model whose tensors are fake ones with storage, whatever device they were made on."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.device.type == "cpu":
                    continue
                if tensor not in made:
                    empty = torch.empty_like(tensor, device="cpu")
                    trained = isinstance(tensor, Parameter)
                    made[tensor] = Parameter(empty, tensor.requires_grad) if trained else empty
                held[name] = made[tensor]  # type: ignore[assignment]
    return model


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _naming_values() -> Iterator[None]:
    """Turn what torch says of an operation that needs values into an error with its place in the user's code."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = "code that is not in a file"
        for frame in traceback.extract_tb(error.__traceback__):
            if not frame.filename.startswith((_TORCH, _OURS)) and Path(frame.filename).is_file():
                where = f"{frame.filename}, line {frame.lineno}: {frame.line}"
        raise SettingError(
            "Cannot estimate the memory of a model that needs the values of tensors.",
            f"{error.func} makes a number or a shape of values, in {where}",
            "Give the shape where accel_torch.training_memory.is_estimating() is true: a fixed capacity instead "
            "of a count, and the branch that needs the most memory.",
        ) from error


@contextmanager
def _fake_group(processes: int, rank: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise SettingError(
            "Cannot estimate the memory of a plan.",
            "This process belongs to a process group.",
            "Estimate in a process of its own, without a launcher.",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()
