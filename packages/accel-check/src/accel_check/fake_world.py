"""One rank of a world that is not there: tensors have shapes and no values, and collectives send nothing.

The script runs as it is. Its data keep their values until a loader yields them; numbers that it reads from tensors
without values, such as `loss.item()`, are 1.0, and comparisons are False.
"""

from __future__ import annotations

import functools
import inspect
import re
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from accel_check.batches import in_prepared_loader, place_in_script
from accel_check.meshes import follow_meshes
from accel_check.models import plain_name
from accel_check.scratch import note_other_files, skip_saves
from accel_state.errors import AccelError

__all__ = (
    "Collective",
    "FakeRank",
    "OnHost",
    "PlanRecord",
    "named_on_host",
    "use_no_accelerator",
)

_BUCKET_BYTES: Final = 25 * 2**20
_COLLECTIVE_NAMESPACES: Final = ("c10d", "_c10d_functional")
_ROOTED_COLLECTIVES: Final = ("scatter_", "gather_")
"""Collectives of which one rank has more tensors than the others."""
_NEEDS_VALUES_TEXTS: Final = (
    "fake tensor",
    "Fake tensor",
    "FakeTensor",
    "numpy() is not supported",
    "Cannot access data pointer",
)
"""In errors of torch where a function reads the values of a tensor that has none."""
_VALUE_READING_OPERATIONS: Final = ("_local_scalar_dense", "equal", "is_nonzero", "allclose")


class Planned(SystemExit):
    """Ends a script after its second step."""


@dataclass(frozen=True)
class Collective:
    """A call of a collective.

    Args:
        operation: its name, such as "allreduce".
        elements: the number of elements that it reads.
        bytes: the bytes that it reads.
        place: the line of the script.
    """

    operation: str
    elements: int
    bytes: int
    place: str = ""


@dataclass
class PlanRecord:
    """What one rank did.

    Args:
        rank: the rank.
        steps: the optimizer steps that it made.
        collectives: the collectives of the second step, in order.
        first: those before it.
        reduced: how often each gradient was sent in the second step, by name, without those that wrappers shard.
        sharded: elements of gradients that wrappers shard, and those that were sent to be reduced.
        backwards: backward passes of the second step.
        alike: the number of ranks that read the same samples as this one.
        neighbours: the next rank along each axis of a mesh.
        memory: bytes at the peak of the second step by purpose, with "Total"; empty if it was not tracked.
        read: places where the script reads a value, which there is not.
        written: files that the script wrote.
        failure: the last line of an error, and the line of the script.
        needs_values: whether the error comes from a shape or branch that depends on values.
    """

    rank: int
    steps: int = 0
    collectives: list[Collective] = field(default_factory=list)
    first: list[Collective] = field(default_factory=list)
    reduced: dict[str, int] = field(default_factory=dict)
    sharded: tuple[int, int] = (0, 0)
    backwards: int = 0
    alike: int = 1
    neighbours: list[int] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    failure: str = ""
    needs_values: bool = False


class FakeRank:
    """Runs a script as one rank.

    Args:
        rank, world: of this process.
        script_folder: the folder of the script.
        scratch: the folder for what the script saves.
        tracks_memory: whether the memory is tracked, which takes several times as long.
    """

    def __init__(self, rank: int, world: int, script_folder: str, scratch: str, tracks_memory: bool) -> None:
        self.record = PlanRecord(rank)
        self._world, self._folder, self._scratch = world, script_folder, scratch
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._tracker = _StepTracker() if tracks_memory else None
        self._calls = _Collectives(self)
        self._contexts = ExitStack()
        self._optimizers: list[weakref.ref[Any]] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        self._alike = {rank}
        self._depth = 0
        self._names: dict[int, str] = {}
        self._packed: Any = WeakIdKeyDictionary()
        """Storages with copies of gradients, and their names."""

    def run(self, script: Callable[[], object]) -> PlanRecord:
        """Run a script until its second step."""
        self._install()
        try:
            with self._contexts:
                self._contexts.enter_context(self._mode)
                if self._tracker is not None:
                    self._contexts.enter_context(self._tracker)
                self._contexts.enter_context(self._calls)
                self._contexts.enter_context(OnHost())
                script()
        except Planned:
            pass
        except SystemExit as ended:
            self.record.failure = f"the script ends with {ended.code!r}" if ended.code else ""
        except BaseException as error:
            self._note_failure(error)
        self.record.alike = len(self._alike)
        return self.record

    def _note_failure(self, error: BaseException) -> None:
        traceback.print_exception(error)
        kinds = (type(error).__name__ for error in (error, error.__cause__, error.__context__) if error is not None)
        lines = str(error).splitlines() or [""]
        # An error of this library has three parts: what failed, why, and what to do.
        text = " ".join(
            [f"{type(error).__name__}:", *map(str.strip, lines[: 3 if isinstance(error, AccelError) else 1])]
        )
        self.record.needs_values = any("DataDependent" in kind or "DynamicOutputShape" in kind for kind in kinds)
        self.record.needs_values |= any(phrase in text for phrase in _NEEDS_VALUES_TEXTS)
        places = [
            f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename.startswith(self._folder)
        ]
        self.record.failure = f"{text} ({places[-1]})" if places else text

    # ------------------------------------------------------------------ what a script meets

    def _install(self) -> None:
        nn.Module._apply = _converted_module  # type: ignore[method-assign]
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        use_no_accelerator()
        skip_saves()
        note_other_files(self._opened, self._folder, (self._scratch,))
        self._fake_group()
        self._outside_of_the_mode()
        self._fake_loaders()
        self._replace_replicas()
        self._follow_constructors()
        register_optimizer_step_pre_hook(self._step_begins)
        register_optimizer_step_post_hook(self._step_ends)
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def counted(*arguments: Any, **options: Any) -> None:
            self.record.backwards += 1
            backward(*arguments, **options)
            if self._tracker is not None:
                # The tracker takes one forward of a module at a time.
                self._tracker.reset_mod_stats()

        torch.autograd.backward = counted

    def _fake_group(self) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        begin = dist.init_process_group

        def begin_fake(*arguments: Any, **options: Any) -> None:
            # A session joins the group of a script, or begins it.
            if not dist.is_initialized():
                with unset_fake_temporarily():
                    begin("fake", store=FakeStore(), rank=self.record.rank, world_size=self._world)

        dist.init_process_group = dist.distributed_c10d.init_process_group = begin_fake
        dist.new_group = self._outside(dist.new_group)

    def _opened(self, path: str, listed: bool) -> None:
        if listed and path not in self.record.written:
            self.record.written.append(path)

    @staticmethod
    def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def outside(*arguments: Any, **options: Any) -> Any:
            with unset_fake_temporarily():
                return function(*arguments, **options)

        return outside

    def _outside_of_the_mode(self) -> None:
        """Let meshes compute with the values of their ranks."""
        for name, function in list(vars(DeviceMesh).items()):
            if inspect.isfunction(function):
                setattr(DeviceMesh, name, self._outside(function))
        follow_meshes(self._note_neighbours, self.reads_alike, lambda create: self._outside(named_on_host(create)))

    def _note_neighbours(self, mesh: DeviceMesh) -> None:
        with unset_fake_temporarily():
            axes = [axis for axis, size in enumerate(mesh.mesh.shape) if size > 1]
            self.record.neighbours += [int(mesh.mesh.select(axis, 1).flatten()[0]) for axis in axes]

    def reads_alike(self, mesh: DeviceMesh) -> None:
        """Note that the ranks of a mesh read the same samples."""
        with unset_fake_temporarily():
            ranks = mesh.mesh.flatten().tolist()
        if self.record.rank in ranks:
            self._alike |= set(ranks)

    def _fake_loaders(self) -> None:
        """Let loaders read data with values, and yield batches without."""
        iterate, end = DataLoader.__iter__, object()

        def read(loader: Any, is_prepared: bool) -> Iterator[Any]:
            with unset_fake_temporarily():
                batches = iterate(loader)
            while True:
                with unset_fake_temporarily():
                    batch = next(batches, end)
                if batch is end:
                    return
                # A prepared loader sends values to other processes; it yields batches without.
                yield batch if is_prepared else self.without_values(batch)

        def followed(loader: Any) -> Iterator[Any]:
            return read(loader, in_prepared_loader(2))

        DataLoader.__iter__ = followed  # type: ignore[method-assign, assignment]

    def without_values(self, batch: Any) -> Any:
        """A batch with the shapes of another one."""
        mode = self._mode
        return pytree.tree_map(
            lambda leaf: (
                mode.from_tensor(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) else leaf
            ),
            batch,
        )

    def _replace_replicas(self) -> None:
        """Replace the methods of DDP, whose reducer reads values, by those of one that sends the same buckets."""
        _Replicas.note.append(self._reduced)
        # Modules that were imported before may hold the class itself.
        for name, function in list(vars(_Replicas).items()):
            if inspect.isfunction(function):
                setattr(nn.parallel.DistributedDataParallel, name, function)

    def _follow_constructors(self) -> None:
        begin, scale = torch.optim.Optimizer.__init__, torch.amp.GradScaler.__init__
        call = nn.Module.__call__

        def scaler_made(scaler: Any, *arguments: Any, **options: Any) -> None:
            # A scaler decides by values whether to step.
            scale(scaler, *arguments, **{**options, "enabled": False})

        def optimizer_made(optimizer: Any, *arguments: Any, **options: Any) -> None:
            begin(optimizer, *arguments, **options)
            self._optimizers.append(weakref.ref(optimizer))

        def called(module: nn.Module, *arguments: Any, **options: Any) -> Any:
            if torch.is_grad_enabled() and all(root() is not module for root in self._roots):
                parameters = {id(one) for root in self._roots if (it := root()) is not None for one in it.parameters()}
                if any(id(one) not in parameters for one in module.parameters()):
                    self._roots.append(weakref.ref(module))
                    self._name_parameters()
            return call(module, *arguments, **options)

        kinds: list[tuple[Any, Callable[..., None]]] = [
            (torch.optim.Optimizer, optimizer_made),
            (torch.amp.GradScaler, scaler_made),
        ]
        for kind, constructor in kinds:
            kind.__init__ = constructor
        nn.Module.__call__ = called  # type: ignore[method-assign]

    # ------------------------------------------------------------------ steps

    def _name_parameters(self) -> None:
        """Note the names of parameters, which wrappers may register under their names only between two steps."""
        for root in self._roots:
            module = root()
            for name, parameter in module.named_parameters() if module is not None else ():
                self._names.setdefault(id(parameter), plain_name(name))

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters of all optimizers, by name."""
        for number, reference in enumerate(self._optimizers):
            optimizer = reference()
            for group in optimizer.param_groups if optimizer is not None else ():
                for index, parameter in enumerate(group["params"]):
                    if isinstance(parameter, Tensor) and parameter.requires_grad:
                        yield self._names.get(id(parameter), f"parameter {index} of optimizer {number}"), parameter

    def called(self, operation: str, tensors: Sequence[Tensor]) -> None:
        """Note a collective of a session."""
        size, count = sum(one.nbytes for one in tensors), sum(one.numel() for one in tensors)
        self.sent(Collective(operation, count, size, self.place), tensors)

    def sent(self, collective: Collective, tensors: Sequence[Tensor]) -> None:
        """Note a collective and the gradients that it sends."""
        self.record.collectives.append(collective)
        if "reduce_scatter" in collective.operation:
            whole, sent = self.record.sharded
            self.record.sharded = whole, sent + collective.elements
        if not self.record.backwards:
            return
        storages = [_local(tensor).untyped_storage() for tensor in tensors]
        packed = {name for storage in storages for name in self._packed.get(storage, ())}
        if collective.operation == "header":
            # Its buffer is used again.
            self._packed.clear()
        for name in self._gradients(storages) | packed:
            self.record.reduced[name] = self.record.reduced.get(name, 0) + 1

    def _gradients(self, storages: Iterable[torch.UntypedStorage]) -> set[str]:
        """The parameters whose gradients are in some storages."""
        ids = {storage._cdata for storage in storages}
        return {
            name
            for name, parameter in self.parameters()
            if parameter.grad is not None and _local(parameter.grad).untyped_storage()._cdata in ids
        }

    def computed(self, sources: Sequence[Tensor], outputs: Iterable[Any]) -> None:
        """Note what is computed of gradients before a step, such as a flat buffer that the script reduces."""
        if not self.record.backwards or self._depth:
            return
        storages = [_local(tensor).untyped_storage() for tensor in sources]
        names = {name for storage in storages for name in self._packed.get(storage, ())} | self._gradients(storages)
        # A norm of them is no gradient.
        for output in outputs if names else ():
            if isinstance(output, Tensor) and output.numel() > 1:
                storage = _local(output).untyped_storage()
                if not self._gradients([storage]):
                    self._packed[storage] = self._packed.get(storage, set()) | names

    def _is_sharded(self, parameter: Tensor) -> bool:
        """Whether a wrapper reduces the gradient of a parameter, by buffers of its own."""
        if isinstance(parameter, DTensor):
            # Ranks of one tensor-parallel group share samples: these gradients need a collective over the others.
            return parameter.device_mesh.size() > len(self._alike)
        wrapped = (one for root in self._roots if (it := root()) is not None for one in it.modules())
        return any(
            isinstance(module, FullyShardedDataParallel) and any(parameter is one for one in module.parameters())
            for module in wrapped
        )

    def _reduced(self, parameters: list[Any]) -> None:
        names = {id(one): name for name, one in self.parameters()}
        for parameter in parameters:
            name = names.get(id(parameter), "")
            self.record.reduced[name] = self.record.reduced.get(name, 0) + 1

    def reads_value(self) -> None:
        """Note a place where the script reads a value."""
        place = place_in_script(self._folder)
        if place and place not in self.record.read:
            self.record.read.append(place)

    @property
    def place(self) -> str:
        """The running line of the script."""
        return place_in_script(self._folder)

    def _step_begins(self, *_: Any) -> None:
        self._depth += 1

    def _step_ends(self, *_: Any) -> None:
        # Some optimizers step others inside of their own step.
        self._depth -= 1
        if self._depth:
            return
        record = self.record
        record.steps += 1
        if record.steps < STEPS:
            record.first, record.collectives, record.reduced = record.collectives, [], {}
            record.sharded, record.backwards = (0, 0), 0
            self._packed.clear()
            if self._tracker is not None:
                self._tracker.begin_step()
            return
        self._name_parameters()
        with_gradient = [(name, one, self._is_sharded(one)) for name, one in self.parameters() if one.grad is not None]
        record.reduced = {name: record.reduced.get(name, 0) for name, _, sharded in with_gradient if not sharded}
        held = sum(_local(one).numel() for _, one, sharded in with_gradient if sharded)
        record.sharded = held, record.sharded[1]
        if self._tracker is not None:
            peak = next(iter(self._tracker.get_tracker_snapshot("peak").values()))
            record.memory = {str(getattr(kind, "value", kind)): int(size) for kind, size in peak.items()}
        raise Planned


class _StepTracker(MemTracker):  # type: ignore[no-untyped-call]
    """Tracks memory, also of frozen parameters, and begins its peak anew."""

    def begin_step(self) -> None:
        """Forget the peak so far, which may be that of the construction of a whole model."""
        self.reset_mod_stats()
        self._peak_mem.clear()
        self._peak_mem_snap.clear()

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        hooked = all(one.is_leaf and one.requires_grad for one in module.parameters())
        return super()._track_module_params_and_buffers(module, install_grad_hooks and hooked)


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes collectives, in forward and in backward, and answers reads of values."""

    def __init__(self, rank: FakeRank) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rank = rank

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = function.name() if hasattr(function, "name") else str(function)
        space, _, operation = name.partition("::")
        operation = operation.partition(".")[0]
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if operation in _VALUE_READING_OPERATIONS and any(isinstance(leaf, FakeTensor) for leaf in leaves):
            self._rank.reads_value()
            dtype = leaves[0].dtype
            if operation != "_local_scalar_dense" or dtype is torch.bool:
                return False
            return 1.0 if dtype.is_floating_point else 1
        if space in _COLLECTIVE_NAMESPACES and operation != "wait_tensor":
            sent = leaves[:1] if operation in _ROOTED_COLLECTIVES else leaves
            elements, size = sum(one.numel() for one in sent), sum(one.nbytes for one in sent)
            self._rank.sent(Collective(operation.strip("_"), elements, size, self._rank.place), leaves)
        if leaves and not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            # What has values keeps them, such as the ranks of a mesh.
            with unset_fake_temporarily():
                return function(*args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        if space == "aten":
            self._rank.computed(leaves, leaves[:1] if operation == "copy_" else pytree.tree_leaves(result))
        return result


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _converted_module(module: nn.Module, function: Callable[..., Any], recurse: bool = True) -> nn.Module:
    """Does what `Module._apply` does, which swaps tensors; those without values cannot be swapped."""
    converted: dict[Tensor, Any] = {}
    for one in module.modules() if recurse else [module]:
        for held in (one._parameters, one._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor not in converted:
                    converted[tensor] = _converted(tensor, function)
                if tensor is not None:
                    held[name] = converted[tensor]
    return module


def _converted(tensor: Tensor, function: Callable[..., Any]) -> Any:
    if not isinstance(tensor, nn.Parameter):
        return function(tensor)
    with torch.no_grad():
        converted = function(tensor.detach())
    # Optimizers may refer to the parameter, so it is kept where it has no values to move.
    same = converted.dtype == tensor.dtype and converted.device == tensor.device
    return tensor if same else nn.Parameter(converted, tensor.requires_grad)


def _split(parameters: list[Any], limit: int) -> Iterator[list[Any]]:
    """Buckets of parameters, in the order in which backward computes their gradients."""
    bucket: list[Any] = []
    for parameter in reversed(parameters):
        bucket.append(parameter)
        if sum(one.nbytes for one in bucket) >= limit:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


class _Replicas(nn.parallel.DistributedDataParallel):
    """The methods that DistributedDataParallel has in a plan: they send each bucket when backward has ended."""

    note: ClassVar[list[Callable[[list[Any]], None]]] = []
    """Called with the parameters of each bucket that was sent."""

    def __init__(self, module: nn.Module, *_: Any, bucket_cap_mb: float | None = None, **options: Any) -> None:
        nn.Module.__init__(self)
        self.module, self.require_backward_grad_sync = module, True
        self.static_graph, self.find_unused_parameters = (
            bool(options.get(name)) for name in ("static_graph", "find_unused_parameters")
        )
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._queued = False
        named = dict(module.named_parameters())
        sent = [one for name, one in named.items() if one.requires_grad and name not in self.parameters_to_ignore]
        limit = _BUCKET_BYTES if bucket_cap_mb is None else int(bucket_cap_mb * 2**20)
        self._buckets = [
            (bucket, torch.cat([one.detach().flatten() for one in bucket])) for bucket in _split(sent, limit)
        ]
        for parameter in sent:
            parameter.register_post_accumulate_grad_hook(self._queue)  # type: ignore[no-untyped-call]

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Change nothing: a hook of communication would need the reducer's buckets."""

    def _queue(self, _: Tensor) -> None:
        if self.require_backward_grad_sync and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._send)

    def _send(self) -> None:
        self._queued = False
        for parameters, buffer in self._buckets:
            present = [one for one in parameters if one.grad is not None]
            # As in the real one, gradients are copied to the bucket and back.
            dist.all_reduce(buffer)
            for parameter in present:
                assert parameter.grad is not None
                parameter.grad.copy_(buffer[: parameter.numel()].view_as(parameter))
            for note in _Replicas.note:
                note(present)


# ---------------------------------------------------------------------- accelerators that a script names

# All tensors of a plan are on the host, so the script receives the host instead of an accelerator.

_ACCELERATOR_DEVICE: Final = re.compile(r"(cuda|xpu|hpu|npu|mps)(:\d+)?")
_SKIPPED_FUNCTIONS: Final = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed_all")
"""Functions of `torch.cuda` that need a device and return nothing."""


def _on_host(value: Any) -> Any:
    named = value.type if isinstance(value, torch.device) else value
    return "cpu" if isinstance(named, str) and _ACCELERATOR_DEVICE.fullmatch(named) else value


def named_on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called with the host instead of each accelerator among its arguments."""

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        return function(*map(_on_host, arguments), **{name: _on_host(value) for name, value in options.items()})

    return called


class OnHost(TorchFunctionMode):
    """A block in which functions of torch receive the host instead of an accelerator."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map(_on_host, (tuple(args), dict(kwargs or {})))
        return function(*args, **kwargs)


def use_no_accelerator() -> None:
    """Let what a script calls of `torch.cuda` do nothing, and autocast choose the host, until this process ends."""

    def skipped(*_: Any, **__: Any) -> None:
        return None

    for name in _SKIPPED_FUNCTIONS:
        setattr(torch.cuda, name, skipped)
    torch.cuda.current_device = lambda: 0
    autocast: Any = torch.autocast
    autocast.__init__ = named_on_host(autocast.__init__)


STEPS: Final = 2
"""Optimizer steps of a plan; the first one creates the states of the optimizer."""
