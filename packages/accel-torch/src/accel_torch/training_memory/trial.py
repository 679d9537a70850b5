"""Runs a training step of a plan with fake tensors, as one rank of a fake process group."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from accel_ops.tree import find_batch_size, recursively_apply
from accel_plugins.blocks import repeated_blocks
from accel_plugins.transforms.activation_checkpoint import ActivationCheckpoint
from accel_plugins.transforms.tensor_parallel import TensorParallel
from accel_state.errors import SettingError
from accel_state.library import OWN_PACKAGES
from accel_torch.training_memory import estimating
from accel_torch.training_memory.live_bytes import LiveBytes, MemoryKind
from accel_torch.training_memory.plans import TrainingPlan, plan_settings, planned_backend

__all__ = (
    "PRECISIONS",
    "RankMemory",
    "TrainingCase",
    "Trial",
    "block_names",
    "count_operations",
    "measure_plan",
    "naming_values",
)

PRECISIONS: Final = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCK: Final = 512
"""Bytes to which torch's device allocator rounds up."""

_STATES: Final = (MemoryKind.PARAMETERS, MemoryKind.GRADIENTS, MemoryKind.OPTIMIZER)
"""Kinds of tensors that an offloading backend stores on the host."""

_NO_VALUES: Final = ("numpy() is not supported for tensor subclasses", "Cannot access data pointer of Tensor")
"""Error texts of torch if a function reads the values of a fake tensor."""

_LIBRARIES: Final = ("torch", "accelerate", "contextlib", "runpy")
"""Packages whose lines are not the user's code, besides this library."""


@dataclass(frozen=True)
class TrainingCase:
    """The training to measure.

    Args:
        build: returns the model, the loss function and one example batch of one process. The loss function takes the
            model and a batch and returns a scalar. The first dimension of the batch is that of the samples.
        optimizer: creates an optimizer from parameters; None for `torch.optim.AdamW`.
    """

    build: Callable[[], tuple[Module, Callable[[Module, Any], Tensor], Any]]
    optimizer: Callable[..., Optimizer] | None = None


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank.

    Args:
        rank: the rank.
        peak: bytes of its device at the peak.
        parts: bytes at the peak, by purpose.
        on_host: the purposes whose tensors are in host memory.
        host: peak bytes of host memory, without the copy of a checkpoint.
        staging: bytes of host memory for the copy that an asynchronous checkpoint makes.
        moved: bytes that collectives read and write in one step.
        copied: bytes copied between host and device in one step.
    """

    rank: int
    peak: int
    parts: dict[str, int] = field(default_factory=dict)
    on_host: tuple[str, ...] = ()
    host: int = 0
    staging: int = 0
    moved: int = 0
    copied: int = 0


def measure_plan(case: TrainingCase, plan: TrainingPlan, rank: int = 0) -> RankMemory:
    """Run two steps of a plan as one rank and return its memory; the first step creates the optimizer's states.

    Raises:
        SettingError: the model needs the values of tensors, or the plan does not apply to it.
    """
    with Trial(plan, rank) as trial:
        model, loss_function, batch = case.build()
        model, batch = trial.prepare_model(model), trial.prepare_batch(batch)
        optimizer = (case.optimizer or torch.optim.AdamW)(one for one in model.parameters() if one.requires_grad)
        trial.prepare_optimizer(optimizer)
        dtype = PRECISIONS[plan.mixed_precision]
        # All micro-batches except the last one use equal memory, so two of them are enough.
        micro_batches = min(plan.accumulation, 2)
        while not trial.is_complete:
            for number in range(micro_batches):
                with trial.no_sync() if number + 1 < micro_batches else nullcontext():
                    with torch.autocast("cpu", dtype=dtype) if dtype is not None else nullcontext():
                        loss = _checked(loss_function(model, batch))
                    loss.backward()  # type: ignore[no-untyped-call]
                del loss
            _step(optimizer)
            optimizer.zero_grad()
        return trial.memory()


def count_operations(case: TrainingCase) -> tuple[Module, Any, float]:
    """Build the model and the example batch with fake tensors, and count the floating-point operations of a step.

    Raises:
        SettingError: the model needs the values of tensors.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with Trial(TrainingPlan()) as trial:
        model, loss_function, batch = case.build()
        model, batch = trial.prepare_model(model), trial.prepare_batch(batch)
        with counter:
            _checked(loss_function(model, batch)).backward()  # type: ignore[no-untyped-call]
    return model, batch, float(counter.get_total_flops())


def _checked(loss: Any) -> Tensor:
    """Check the result of a loss function.

    Raises:
        SettingError: gradients cannot be computed from it.
    """
    if not isinstance(loss, Tensor):
        obstacle = f"The loss function returned a {type(loss).__name__}, not a tensor."
    elif loss.numel() != 1:
        obstacle = f"The loss function returned a tensor of shape {tuple(loss.shape)}, not a scalar."
    elif not loss.requires_grad:
        obstacle = "The loss does not depend on a trained parameter: all are frozen, or the loss is detached."
    else:
        return loss
    raise SettingError(
        "Cannot estimate the memory of a step.",
        obstacle,
        "Return the mean or the sum of the model's outputs from loss_function(model, batch).",
    )


def _step(optimizer: Optimizer) -> None:
    """Step an optimizer.

    Raises:
        SettingError: the optimizer needs more than dense gradients, for example a closure.
    """
    try:
        optimizer.step()
    except (TypeError, RuntimeError) as error:
        raise SettingError(
            f"Cannot estimate the memory of training with the optimizer {type(optimizer).__name__}.",
            f"Its step fails: {error}",
            "Give another one with --optimizer.",
        ) from error


class Trial:
    """Context manager in which two optimizer steps of a plan run as one rank, with fake tensors.

    Args:
        plan: the plan.
        rank: the rank.
        mode: the mode of existing fake tensors.
    """

    def __init__(self, plan: TrainingPlan, rank: int = 0, mode: FakeTensorMode | None = None) -> None:
        self.plan, self._rank = plan, rank
        self._plans = planned_backend(plan.backend).plans
        self._on_host = _STATES if self._plans.keeps_states_on_host(plan.variant) else ()
        on_cpu = plan.device == "cpu"
        self._mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
        self._live = LiveBytes(
            self._mode, self._on_host, 1 if on_cpu else _BLOCK, _workspace_on_cpu if on_cpu else None
        )
        self._contexts = ExitStack()
        self._held: list[Tensor] = []
        self._bytes_of_strategy = 0
        self._tensors: list[Tensor] = []
        self._parameters: list[Tensor] = []
        self._modules: list[Module] = []
        self._optimizer: Optimizer | None = None
        self._steps = self._moved = self._moved_unsynced = 0

    def __enter__(self) -> Trial:
        enter = self._contexts.enter_context
        enter(estimating())
        enter(_fake_group(self.plan.processes, self._rank))
        enter(naming_values())
        # A mesh reads the values of its ranks.
        shape = (self.plan.data_processes, self.plan.tp)
        self._mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
        self._along_data, self._along_tensors = self._mesh["dp_shard"], self._mesh["tp"]
        enter(self._mode)
        enter(self._live)
        enter(torch.random.fork_rng(devices=[]))
        return self

    def __exit__(self, *failure: Any) -> None:
        self._contexts.__exit__(*failure)

    def prepare_model(self, model: Module) -> Module:
        """Prepare a model of fake tensors as the plan shards it."""
        plan, live = self.plan, self._live
        live.default = MemoryKind.COMMUNICATION
        model = self._without_values(model)
        # Neither transform reads the context if it receives a mesh.
        context: Any = None
        if plan.tp > 1:
            model = TensorParallel(mesh=self._along_tensors).apply(model, context)
        if plan.recompute:
            model = ActivationCheckpoint().apply(model, context)
        if plan.data_processes > 1:
            settings = plan_settings(plan, block_names(model))
            overhead = self._plans.parallelize(model, self._along_data, settings, plan.mixed_precision)
            self._held += overhead.held
            self._bytes_of_strategy += overhead.bytes_moved
        trained = [one for one in model.parameters() if one.requires_grad]
        self._tensors += [*model.parameters(), *model.buffers()]
        self._mark_parameters()
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._mark_gradient)  # type: ignore[no-untyped-call]
        self._parameters += trained
        self._modules.append(model)
        live.default = MemoryKind.ACTIVATIONS
        live.after_collective = self._mark_gradients
        return model

    def prepare_batch(self, batch: Any) -> Any:
        """Resize a batch to the samples of a micro-batch."""
        size, present = self.plan.micro_batch, find_batch_size(batch)

        def sized(tensor: Tensor) -> Tensor:
            made: Tensor = self._mode.from_tensor(tensor)
            if size and tensor.ndim and tensor.shape[0] == present:
                made = torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype, requires_grad=tensor.requires_grad)
            self._live.track(made, MemoryKind.ACTIVATIONS)
            return made

        return recursively_apply(sized, batch)

    def prepare_optimizer(self, optimizer: Optimizer) -> None:
        """Count the states of an optimizer, and use its steps as those of the trial."""
        if self.plan.device != "cpu" and not self._on_host:
            for group in optimizer.param_groups:
                if group.get("foreach", True) is None and not group.get("fused"):
                    group["foreach"] = True
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager for forward and backward of a micro-batch that is not the last."""
        before = self._live.moved
        sharded = [module for module in self._modules if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_requires_gradient_sync(False)
        yield
        for module in sharded:
            module.set_requires_gradient_sync(True)
        self._moved_unsynced = self._live.moved - before

    @property
    def is_complete(self) -> bool:
        """Whether the measured step is done: the second one, which begins with the optimizer's states."""
        return self._steps == 2

    def memory(self) -> RankMemory:
        """The memory of the rank in the last step."""
        held = sum(_local(one).nbytes for one in self._tensors)
        states = sum(_local(one).nbytes for one in self._states())
        # All micro-batches without synchronisation move equally many bytes.
        moved = self._moved + self._moved_unsynced * max(self.plan.accumulation - 2, 0)
        copied = 0
        if self._on_host:
            copied = (2 * held + sum(_local(one).nbytes for one in self._parameters)) * self.plan.accumulation
        parts = {kind.value: size for kind, size in self._live.at_peak.items()}
        on_host = tuple(kind.value for kind in self._on_host)
        staging = held + states
        return RankMemory(self._rank, self._live.peak, parts, on_host, self._live.host_peak, staging, moved, copied)

    def _before_step(self, *_: Any) -> None:
        self._mark_gradients()
        if self._on_host:
            self._live.default = MemoryKind.OPTIMIZER

    def _after_step(self, *_: Any) -> None:
        live = self._live
        for state in self._states():
            live.track(state, MemoryKind.OPTIMIZER)
        live.default = MemoryKind.ACTIVATIONS
        self._steps += 1
        self._moved = live.moved + self._bytes_of_strategy
        # Shards that are smaller than those of other ranks are padded in the first forward.
        self._mark_parameters()
        if not self.is_complete:
            # DTensor infers shapes with full tensors, once for each operation.
            live.reset_peak()
            live.moved = 0

    def _states(self) -> Iterator[Tensor]:
        for state in self._optimizer.state.values() if self._optimizer is not None else ():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def _mark_parameters(self) -> None:
        for tensor in self._tensors:
            self._live.track(tensor.detach(), MemoryKind.PARAMETERS)

    def _mark_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._live.track(parameter.grad, MemoryKind.GRADIENTS)

    def _mark_gradients(self) -> None:
        for parameter in self._parameters:
            self._mark_gradient(parameter)

    def _without_values(self, model: Module) -> Module:
        """A model whose tensors are fake ones on the host, whatever their device was."""
        made: dict[Tensor, Tensor] = {}
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is None or (isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"):
                        continue
                    if tensor not in made:
                        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                        trained = isinstance(tensor, Parameter)
                        made[tensor] = Parameter(empty, tensor.requires_grad) if trained else empty
                    held[name] = made[tensor]  # type: ignore[assignment]
        return model


def block_names(model: Module) -> list[str]:
    """Class names of a model's repeated blocks."""
    return list(dict.fromkeys(type(block).__name__ for block in repeated_blocks(model)))


def _workspace_on_cpu(name: str, given: list[Tensor], results: list[Tensor]) -> int:
    """Temporary copies in the allocator: in another layout for oneDNN convolutions, of the full tensor for gloo."""
    if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
        return max(tensor.nbytes for tensor in given)
    if name == "aten::convolution":
        inputs, weight, *_ = given
        return max(inputs.nbytes + weight.nbytes, results[0].nbytes)
    if name == "aten::convolution_backward":
        gradient, inputs, *_ = given
        return gradient.nbytes + inputs.nbytes
    return 0


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def naming_values() -> Iterator[None]:
    """Convert torch's error for an operation that needs values into one with the line of the user's code."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, RuntimeError) as error:
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            operation = f"{error.func} computes a number or a shape from values"
        elif any(text in str(error) for text in _NO_VALUES):
            operation = f"Values are read ({error})"
        else:
            raise
        where = "code that is not in a file"
        for frame, line in traceback.walk_tb(error.__traceback__):
            package, file = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_filename
            if package not in _LIBRARIES and package not in OWN_PACKAGES and Path(file).is_file():
                where = f"{file}, line {line}: {linecache.getline(file, line).strip()}"
        raise SettingError(
            "Cannot estimate the memory of a model whose shapes or branches depend on values.",
            f"{operation}, in {where}",
            "If accel_torch.training_memory.is_estimating() is true, use a fixed shape instead of a count, and the "
            "branch that needs most memory.",
        ) from error


@contextmanager
def _fake_group(processes: int, rank: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise SettingError(
            "Cannot estimate the memory of a plan.",
            "This process belongs to a process group.",
            "Run the estimate in another process, without a launcher.",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()
