"""Records what a training script computes, optimizer step by optimizer step, at the public points of torch.

Nothing of the script changes, and the recorder calls no collective: each process keeps the parts of tensors that it
has, and the comparison joins them.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from accel_check.batches import Batches
from accel_check.digests import digest, generators, sample_digests
from accel_check.meshes import follow_meshes
from accel_check.models import Models, piece_of
from accel_check.records import OutputSums, RankFacts, Records, StepRecord, TensorPart, values_of, write_record
from accel_check.task import Task

__all__ = (
    "StepFollower",
    "StepRecorder",
    "StopScript",
    "divisor_of",
    "turn_off_dropout",
    "turn_off_recurrent_dropout",
    "unchanged_copies",
)

_MAX_UNRECORDED_STEPS: Final = 1000
_MAX_UNRECORDED_S: Final = 30.0
"""How long a script whose sampler never got an epoch trains on, unrecorded, until its second pass."""


class StopScript(SystemExit):
    """Ends a script after its last compared step."""


class StepFollower(Protocol):
    """Follows the steps that a recorder sees; `accel_check.resume_notes` does."""

    def forward_begins(self) -> None:
        """Called before each forward of a model."""

    def step_begins(self, step: StepRecord) -> None:
        """Called with the record of a step before it."""

    def step_ends(self, step: StepRecord) -> bool:
        """Called with the record of a step after it; returns whether it is the last one."""

    def finish(self) -> dict[str, Any]:
        """Called at the end; returns facts about this process."""


class StepRecorder:
    """Records what one process computes.

    Args:
        task: the task of the run.
        script: the path of the script.
        rank, world: of this process.
    """

    def __init__(self, task: Task, script: str, rank: int, world: int) -> None:
        self.task, self.script = task, str(Path(script).resolve())
        self.script_folder = str(Path(self.script).parent) + "/"
        self.facts = RankFacts(rank, world, (rank,))
        self.models = Models()
        self.folder = Path(task.folder, f"rank_{rank}")
        self.optimizers: list[weakref.ref[Any]] = []
        self._stepped: list[Any] = []
        self.schedulers: list[weakref.ref[LRScheduler]] = []
        self.step = StepRecord()
        self.calls = 0
        self.more_state: list[Callable[[], dict[str, dict[str, str]]]] = []
        """Return digests of further state, by group and path."""
        self.compared_objects: list[Callable[[], list[Any]]] = []
        """Return objects whose state is compared already."""
        self.read_gradients: Callable[[], dict[str, TensorPart]] = self._own_gradients
        self.read_parameters: Callable[[], dict[str, TensorPart]] = self._own_parameters
        self.other = Records(Path(task.follows)) if task.follows else None
        replayed = (
            []
            if self.other is None
            else [Path(task.follows, f"rank_{one.rank}") for one in self.other.representatives()]
        )
        self.batches = Batches(self.script_folder, self.folder, replayed, self.batch_given, task.resume is None)
        self._numbers: dict[int, int] = {}
        self._steps: dict[int, int] = {}
        self._depth = 0
        self._stack: list[nn.Module] = []
        self._starts = 0
        self._begun: dict[str, str] = {}
        self._mark: dict[str, str] = {}
        self._unscaled: set[int] = set()
        self.scalers: list[weakref.ref[Any]] = []
        self._copies: dict[str, Any] = {}
        self._ends_at = 0.0
        self.follower: StepFollower | None = None
        self._has_run = False
        """Whether a model was called: loading may step an optimizer with zero gradients to create its states."""
        self.clipping = False
        """Whether gradients are being clipped, so that clipping inside of it is not recorded again."""

    # ------------------------------------------------------------------ hooks

    def install(self) -> None:
        """Follow what happens in this process until it ends."""
        if self.task.resume is None:
            # The compiler cannot trace what is recorded, and an uncompiled model computes the same.
            torch.compiler.set_stance("force_eager")
            turn_off_dropout(self._dropout_called)
        if self.task.double:
            torch.set_default_dtype(torch.float64)
        self._wrap_modules()
        register_optimizer_step_pre_hook(self._step_begins)
        register_optimizer_step_post_hook(self._step_ends)
        self._wrap_backward()
        self._wrap_clipping()
        self._wrap_constructors()
        follow_meshes(self._mesh_created, lambda mesh: self.read_alike(mesh.mesh.flatten().tolist()))
        self.batches.install()

    def _wrap_modules(self) -> None:
        """Follow calls of modules around all hooks, which may divide inputs and join outputs."""
        call = nn.Module.__call__

        def called(module: nn.Module, *arguments: Any, **options: Any) -> Any:
            self._forward_begins(module, (arguments, options))
            try:
                output = call(module, *arguments, **options)
            finally:
                self._stack.pop()
            self._forward_ends(module, output)
            return output

        nn.Module.__call__ = called  # type: ignore[method-assign]

    def _wrap_backward(self) -> None:
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def noted(tensors: Any, *arguments: Any, **options: Any) -> None:
            self.before_backward(tensors)
            backward(tensors, *arguments, **options)
            self.after_backward()

        torch.autograd.backward = noted

    def _wrap_clipping(self) -> None:
        for module in (nn.utils, nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                setattr(module, name, self._clipping(getattr(module, name)))

    def _clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def noted(parameters: Any, *arguments: Any, **options: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self.before_clip()
            outer, self.clipping = self.clipping, True
            norm = clip(parameters, *arguments, **options)
            self.clipping = outer
            self.after_clip(norm)
            return norm

        return noted

    def _wrap_constructors(self) -> None:
        begin_optimizer, begin_scheduler = torch.optim.Optimizer.__init__, LRScheduler.__init__
        unscale, begin_scaler = torch.amp.GradScaler.unscale_, torch.amp.GradScaler.__init__

        def optimizer_made(optimizer: Any, *arguments: Any, **options: Any) -> None:
            begin_optimizer(optimizer, *arguments, **options)
            self.optimizers.append(weakref.ref(optimizer))

        def scheduler_made(scheduler: Any, *arguments: Any, **options: Any) -> None:
            begin_scheduler(scheduler, *arguments, **options)
            self.schedulers.append(weakref.ref(scheduler))

        def unscaled(scaler: Any, optimizer: Any) -> None:
            unscale(scaler, optimizer)
            self._unscaled.add(id(optimizer))

        def scaler_made(scaler: Any, *arguments: Any, **options: Any) -> None:
            begin_scaler(scaler, *arguments, **options)
            self.scalers.append(weakref.ref(scaler))

        kinds: list[tuple[Any, str, Callable[..., None]]] = [
            (torch.optim.Optimizer, "__init__", optimizer_made),
            (LRScheduler, "__init__", scheduler_made),
            (torch.amp.GradScaler, "__init__", scaler_made),
            (torch.amp.GradScaler, "unscale_", unscaled),
        ]
        for kind, name, followed in kinds:
            setattr(kind, name, followed)

    def _mesh_created(self, _: Any) -> None:
        self.facts.shards_known = True

    def read_alike(self, ranks: list[int]) -> None:
        """Note ranks that read the same samples as this one on purpose."""
        if self.facts.rank in ranks:
            self.facts.alike = tuple(sorted({*self.facts.alike, *ranks}))
            self.facts.shards_known = True

    # ------------------------------------------------------------------ batches and forward

    def batch_given(self, key: str, ids: list[str]) -> None:
        """Record a batch that the script receives."""
        self.facts.reads_loader = True
        self.step.samples.append(ids)
        self.step.feeds.append(key.rpartition(" ")[0])
        self._mark = generators()

    def _forward_begins(self, module: nn.Module, inputs: Any) -> None:
        outermost = not self._stack
        self._stack.append(module)
        if not outermost or not torch.is_grad_enabled() or not module.training:
            return
        if not self.models.knows(module):
            self.adopt(module)
        self._has_run = self._has_run or self.models.knows(module)
        if self.follower is not None and self._has_run:
            self.follower.forward_begins()
        if not self.facts.reads_loader:
            self._mark = self._mark or generators()
            if self.models.knows(module):
                self.step.rows += sample_digests(inputs)

    def adopt(self, root: nn.Module) -> None:
        """Record the state of a new model before its first step, and continue from that of the other run."""
        start = self.models.add(root)
        if start is None:
            return
        if self.task.resume is None:
            turn_off_recurrent_dropout(root)
        if self.sees_gradients:
            for number, reference in enumerate(self.optimizers):
                optimizer = reference()
                if optimizer is not None and self._is_outermost(optimizer):
                    start.parameters |= self.models.add_outside(number, optimizer.param_groups).parameters
        else:
            # The optimizer of an engine has flat parts of the parameters, others on each process.
            start.parameters = self.read_parameters()
        self.facts.models = len(self.models)
        if self.follower is None:
            write_record(self.folder / f"start_{self._starts}.pt", start)
            self._starts += 1
            self._load_start()

    @staticmethod
    def _is_outermost(optimizer: Any) -> bool:
        return all(isinstance(one, Tensor) for group in optimizer.param_groups for one in group["params"])

    def _load_start(self) -> None:
        if self.other is None:
            return
        starts = self.other.start()

        def value(name: str) -> Tensor | None:
            for kind in ("parameters", "buffers"):
                pieces = [getattr(start, kind).get(name) for start in starts]
                if any(piece is not None for piece in pieces):
                    return next(one for one in values_of(pieces) if one is not None)
            return None

        self.facts.more["other shapes"] = self.models.load(value)

    def _forward_ends(self, module: nn.Module, output: Any) -> None:
        name = self.models.name(module)
        if name is None or not torch.is_grad_enabled() or not module.training or self._depth:
            return
        sums = self.step.outputs.setdefault(name, OutputSums())
        sums.calls += 1
        for tensor in pytree.tree_leaves(output):
            self.facts.low_precision |= getattr(tensor, "dtype", None) in (torch.float16, torch.bfloat16)
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not hasattr(tensor, "placements"):
                values = tensor.detach().double()
                sums.elements += values.numel()
                sums.total += float(values.sum())
                sums.squares += float(values.square().sum())
                if values.ndim:
                    features = values.reshape(-1, values.shape[-1]).sum(0).cpu()
                    if sums.features is not None and sums.features.shape == features.shape:
                        features = features + sums.features
                    sums.features = features

    def _dropout_called(self) -> None:
        if self.step.dropout is None:
            name = self.models.name(self._stack[-1]) if self._stack else None
            self.step.dropout = (name or "", digest(torch.get_rng_state()))

    # ------------------------------------------------------------------ backward and clipping

    def before_backward(self, tensors: Any) -> None:
        """Record a loss."""
        loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        if isinstance(loss, Tensor) and loss.numel() == 1 and not hasattr(loss, "placements"):
            self.step.losses.append(float(loss.detach()))
            self.step.divisors.append(divisor_of(loss))
        self.step.unsynchronised.append(any(not one.require_backward_grad_sync for one in self.models.replicas()))

    def after_backward(self) -> None:
        """Record the gradients that this process has now."""
        if self.task.resume is None and self.sees_gradients:
            self.step.after_backward = self.read_gradients()

    def before_clip(self) -> None:
        """Record the gradients before they are scaled down."""
        if self.clipping or self.task.resume is not None:
            return
        self.step.before_clip = self.read_gradients() or self.step.before_clip
        for reference in self.scalers:
            scaler = reference()
            if scaler is not None and scaler.is_enabled() and scaler.get_scale() != 1 and not self._unscaled:
                self.remark("gradients are clipped before the scaler's unscale_, so that the limit is too small")

    def after_clip(self, norm: Any) -> None:
        """Record their norm."""
        if norm is not None and not self.clipping:
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            self.step.norms.append(float(norm))

    def remark(self, sentence: str) -> None:
        """Record what one process does as well."""
        if sentence not in self.facts.remarks:
            self.facts.remarks.append(sentence)

    @property
    def sees_gradients(self) -> bool:
        """Whether gradients can be read without a collective."""
        return self.read_gradients == self._own_gradients

    def _own_gradients(self) -> dict[str, TensorPart]:
        return {name: piece_of(one.grad) for name, one in self.models.parameters() if one.grad is not None}

    def _own_parameters(self) -> dict[str, TensorPart]:
        return {name: piece_of(one) for name, one in self.models.parameters()}

    # ------------------------------------------------------------------ steps

    def _step_begins(self, optimizer: Any, arguments: Any, options: Any) -> Any:
        self._depth += 1
        # Some optimizers step others inside of their own step.
        if self._depth > 1 or not self._has_run:
            return None
        closure = (*arguments, *options.values(), None)[0]
        if not callable(closure):
            self._record_gradients(optimizer)
            return None

        def recorded() -> Any:
            loss = closure()
            self._record_gradients(optimizer)
            return loss

        return (recorded,), {}

    def _record_gradients(self, optimizer: Any) -> None:
        number = self._number(optimizer)
        if self.steps_of(number) >= self.task.steps and self.follower is None:
            self._stop()
        step = self.step
        step.optimizer = number
        resumed_at = 0 if self.task.resume is None else self.task.resume.resumed_at
        step.number = resumed_at + self.steps_of(number) + 1
        if self.follower is not None:
            self.follower.step_begins(step)
        step.rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        step.drew = bool(self._mark) and self._mark != generators()
        if self.task.resume is None:
            step.gradients = self.read_gradients() or step.after_backward
            if any(value != 0 for value in step.losses) and not step.gradients:
                self.remark("the optimizer steps without any gradient although backward has run")

    def _step_ends(self, optimizer: Any, *_: Any) -> None:
        self._depth -= 1
        if self._depth or not self._has_run:
            return
        if self.sees_gradients:
            self._complete_step(optimizer)
        else:
            self._stepped.append(optimizer)

    def after_engine_steps(self) -> None:
        """Complete steps of an engine, which has now copied to the weights what its optimizer had computed."""
        while self._stepped:
            self._complete_step(self._stepped.pop(0))

    def _complete_step(self, optimizer: Any) -> None:
        self._unscaled.clear()
        number = self._number(optimizer)
        self._steps[number] = self._steps.get(number, 0) + 1
        self.calls += 1
        if not self.batches.recording:
            self._go_on()
            return
        step, self.step = self.step, StepRecord()
        self._mark = {}
        if self.task.resume is None:
            step.parameters = self.read_parameters()
            step.buffers = {name: piece_of(one) for name, one in self.models.buffers()}
            unchanged_copies(sys._getframe(), self.script, self.models, self._copies)
        last = self.follower is not None and self.follower.step_ends(step)
        write_record(self.folder / f"step_{self.calls}.pt", step)
        if last:
            raise StopScript
        if self.follower is None and len(self._numbers) == 1 and self._steps[number] >= self.task.steps:
            self._stop()

    def _number(self, optimizer: Any) -> int:
        return self._numbers.setdefault(id(optimizer), len(self._numbers))

    def steps_of(self, number: int) -> int:
        """The steps that an optimizer has made."""
        return self._steps.get(number, 0)

    def _stop(self) -> None:
        """End the script, unless its second pass over the data is still to be seen."""
        if self.batches.recording and self.batches.shuffled_without_epoch and not self.task.is_reference:
            self.batches.recording = False
            self._ends_at = time.monotonic() + _MAX_UNRECORDED_S
            return
        if self.batches.recording:
            raise StopScript

    def _go_on(self) -> None:
        if self.batches.repeats or self.calls > _MAX_UNRECORDED_STEPS or time.monotonic() > self._ends_at:
            raise StopScript

    def finish(self) -> None:
        """Write the facts about this process."""
        if self.batches.repeats:
            self.remark(
                "a pass over the data has the same order as the one before although it is shuffled: call "
                "sampler.set_epoch(epoch) before each epoch"
            )
        if self.batches.padding > 0:
            self.remark(
                f"the padding of the sampler repeats {self.batches.padding} samples in each epoch, which losses and "
                "metrics count twice"
            )
        for name, (changed, _) in self._copies.items():
            if not changed and self.calls > 1:
                self.remark(f"{name} has the shapes of the trained model and does not change: is it a stale average?")
        if self.follower is not None:
            self.facts.more |= self.follower.finish()
        self.batches.finish()
        write_record(self.folder / "facts.pt", self.facts)


# ---------------------------------------------------------------------- signs of faults that one process has as well


_MAX_SIGNS: Final = 20


def divisor_of(loss: Tensor) -> float:
    """By what a loss was divided after it was computed: the product of the last divisions and multiplications."""
    divisor, node = 1.0, loss.grad_fn
    for _ in range(_MAX_SIGNS):
        kind = type(node).__name__
        if node is None or kind not in ("DivBackward0", "MulBackward0"):
            break
        other: Any = getattr(node, "_saved_other", None)
        parents = [one for one, _ in node.next_functions if one is not None]
        if len(parents) != 1:
            break
        value = float(other) if isinstance(other, (int, float)) or _is_number(other) else 0.0
        if not value:
            break
        divisor = divisor * value if kind == "DivBackward0" else divisor / value
        node = parents[0]
    return divisor


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad


def unchanged_copies(frame: FrameType | None, script: str, models: Models, seen: dict[str, Any]) -> None:
    """Note modules of the script that have the shapes of a trained model, and whether they ever change.

    Args:
        frame: the innermost running frame.
        script: the script's file.
        models: the models that are trained.
        seen: for each variable, whether it has changed, and its values.
    """
    trained = {id(parameter) for _, parameter in models.parameters()}
    shapes = sorted(tuple(parameter.shape) for _, parameter in models.parameters() if parameter.requires_grad)
    while frame is not None:
        if frame.f_code.co_filename == script:
            for name, value in list(frame.f_locals.items()):
                if not isinstance(value, nn.Module) or any(id(one) in trained for one in value.parameters()):
                    continue
                if sorted(tuple(one.shape) for one in value.parameters()) != shapes:
                    continue
                now = [one.detach().clone() for one in value.parameters()]
                changed, before = seen.get(name, (False, now))
                changed = changed or any(not torch.equal(one, two) for one, two in zip(now, before, strict=True))
                seen[name] = changed, now
        frame = frame.f_back


# ---------------------------------------------------------------------- dropout

# It is turned off, so that runs can be compared. The layers of torch and most models look up the functions of
# `torch.nn.functional` when they call them, so these functions are replaced.

_DROPOUT_FUNCTIONS: Final = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def turn_off_dropout(drawn: Callable[[], None]) -> None:
    """Replace the functions of torch until the process ends.

    Args:
        drawn: called where a mask would be drawn.
    """
    functional: Any = nn.functional

    def identity(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
        if training and p:
            drawn()
        return input

    for name in _DROPOUT_FUNCTIONS:
        setattr(functional, name, identity)
    torch.dropout = identity  # type: ignore[assignment]
    attention = functional.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Any:
        names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        named = dict(zip(names, arguments, strict=False)) | options
        if named.pop("dropout_p", 0.0):
            drawn()
        return attention(query, key, value, **named)

    functional.scaled_dot_product_attention = attend


def turn_off_recurrent_dropout(model: nn.Module) -> None:
    """Turn off the dropout between the layers of recurrent networks, which their kernels apply."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
