"""One stage of a model that is cut over processes: traced by torch.distributed.pipelining, run in rounds of chunks."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accel_ops.objects import broadcast_object_list
from accel_ops.shape import concatenate
from accel_state import current
from accel_state.errors import AccelError, Missing, NotOffered, SettingError

__all__ = ("Stage",)


def _not_installed(error: BaseException) -> str | None:
    """The package whose absence is behind an error, which torch hands on as one of its own."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__ or cause.__context__
    return None if cause is None else cause.name


def _greet_in_one_dtype(stage: Any) -> None:
    """Let a stage of torch 2.9, which sends its neighbours an integer, send the float that they wait for."""
    made = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if made is None:
        return

    def operations() -> list[Any]:
        found: list[Any] = made()
        for operation in found:
            operation.tensor = operation.tensor.float()
        return found

    stage._get_init_p2p_neighbors_ops = operations


@dataclass
class _Form:
    """How inputs or an output are built: their nesting, and their leaves, with `Tensor` in place of each tensor."""

    structure: Any = None
    fixed: tuple[Any, ...] = ()

    def take(self, data: Any) -> list[Tensor]:
        """Remember the form of nested data; its tensors in a row."""
        leaves, self.structure = pytree.tree_flatten(data)
        self.fixed = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def give(self, tensors: Iterable[Tensor]) -> Any:
        """Nested data of this form with these tensors."""
        found = iter(tensors)
        leaves = [next(found) if value is Tensor else value for value in self.fixed]
        return pytree.tree_unflatten(leaves, self.structure)


class _Flat(nn.Module):
    """A model that takes its tensors in a row and gives those of its output in a row.

    Every tensor is copied first: the tracer hands on what a stage has computed, but not what the model was given.
    """

    def __init__(self, model: nn.Module, inputs: _Form, output: _Form) -> None:
        super().__init__()
        self.model = model
        # Kept in objects of their own, because the tracer undoes what it sees assigned to a module.
        self.inputs, self.output = inputs, output

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self.inputs.give(tensor.clone() for tensor in tensors)
        return tuple(self.output.take(self.model(*args, **kwargs)))


class Stage:
    """The part of the model that this process runs.

    Args:
        model: the whole model.
        split_points: names of the modules with which the second and later stages begin.
        args: example of the positional inputs.
        kwargs: the same by keyword.
        rows: rows of one chunk.
        chunks: chunks of one round.

    Raises:
        SettingError: a tensor of the example has no rows, or fewer than a chunk.
        NotOffered: the model cannot be traced.
        Missing: a package that is needed for it is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        split_points: Sequence[str],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rows: int,
        chunks: int,
    ) -> None:
        pipelining: Any = importlib.import_module("torch.distributed.pipelining")
        process = current.process_or_start()
        self.name, self.rows, self.chunks = type(model).__name__, rows, chunks
        self.process = process
        self.inputs, self.output = _Form(), _Form()
        self.inputs.take((args, dict(kwargs)))
        flat = _Flat(model, self.inputs, self.output)
        begin = pipelining.SplitPoint.BEGINNING
        example = tuple(leaf[:rows] for leaf in self._tensors(args, kwargs))
        try:
            with torch.no_grad():
                pipe = pipelining.pipeline(flat, example, split_spec={f"model.{p}": begin for p in split_points})
        except Exception as error:  # whatever the tracer meets in the model's code
            asked = f"Cut {self.name} into stages."
            if (package := _not_installed(error)) is not None:
                raise Missing(
                    asked, f"To trace it needs {package!r}, which is not installed.", f"pip install {package}"
                ) from error
            raise NotOffered(
                asked,
                f"torch.export cannot trace it: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                "Give example inputs like those to come, and take branches that depend on values out of its forward.",
            ) from error
        stage = pipe.build_stage(process.rank, process.device)
        _greet_in_one_dtype(stage)
        self.schedule = pipelining.ScheduleGPipe(stage, chunks)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch together with the other processes; the first gives the inputs, the last returns the output.

        The batch is padded to whole rounds of `chunks` chunks, and so is the output.

        Raises:
            SettingError: on every process, when the inputs do not fit those that the stage was traced with.
        """
        outputs = [self.schedule.step(*tensors) for tensors in self._rounds(args, kwargs)]
        if self.process.rank != self.process.world_size - 1:
            return None
        return self.output.give(concatenate([out if isinstance(out, (tuple, list)) else (out,) for out in outputs]))

    def _rounds(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Tensor, ...]]:
        """The inputs of each round; on processes but the first without any."""
        mine: list[tuple[Tensor, ...]] | AccelError = []
        if self.process.rank == 0:
            try:
                mine = self._cut(self._tensors(args, kwargs))
            except AccelError as error:
                mine = error
        told: list[Any] = [mine if isinstance(mine, AccelError) else len(mine)]
        broadcast_object_list(told)
        if isinstance(told[0], AccelError):
            raise told[0]
        return mine if isinstance(mine, list) and mine else [()] * told[0]

    def _tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of the inputs, which must be built like those of the example and have rows in common."""
        asked = f"Run {self.name} in stages."
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        if structure != self.inputs.structure:
            raise SettingError(
                asked,
                f"It was traced for inputs like {self.inputs.structure}, not {structure}.",
                "Give the same inputs.",
            )
        for leaf, fixed in zip(leaves, self.inputs.fixed, strict=True):
            if isinstance(leaf, Tensor) != (fixed is Tensor) or (fixed is not Tensor and leaf != fixed):
                raise SettingError(
                    asked,
                    f"It was traced with {fixed!r} where there is {leaf!r} now.",
                    "Prepare another model with it.",
                )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len({tensor.shape[:1] for tensor in tensors}) != 1 or tensors[0].dim() == 0:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise SettingError(
                asked, f"Its inputs of shape {shapes} have no first dimension in common.", "Give whole batches."
            )
        return tensors

    def _cut(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        size = self.rows * self.chunks
        # At least one round, for which an empty batch is padded whole.
        count = max(1, -(-tensors[0].shape[0] // size))
        padded = [torch.cat([t, t.new_zeros(count * size - t.shape[0], *t.shape[1:])]) for t in tensors]
        parts = [torch.split(tensor.to(self.process.device), size) for tensor in padded]
        return list(zip(*parts, strict=True))
