"""`WholeMatrices`: each sharded matrix of an optimizer is stepped once, whole, by the process that owns it.

Optimizers such as Muon and SOAP compute with whole matrices. With DTensors they gather each matrix on every process,
some in each iteration, and every process computes the same. Here the owner of a matrix receives its shards, makes the
optimizer's own step with it, and sends every process its shard of the result.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Muon, Optimizer

from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.files import whole_matrices_name
from accel_plugins.parameters import parameter_names
from accel_plugins.prepared import add_hook
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.errors import CheckpointError, Conflict, NotOffered
from accel_torch.matrix_owners import OwnedMatrix, from_owners, is_sharded_matrix, own_part, rounds_of, to_owners
from accel_torch.start_run import open_sessions

if TYPE_CHECKING:
    from torch.nn import Module

    from accel_torch.session import Session

__all__ = ("WholeMatrices",)

_ORTHOGONALISES_ONLY: Final[Mapping[str, Any]] = {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
"""Options of Muon for a step without momentum and decay, which are computed on the shards."""


class WholeMatrices:
    """Makes the steps of an optimizer with whole matrices, each computed by one process.

    It follows the steps of the optimizer, until `remove`. Parameters that are not sharded matrices are stepped as
    before. With `torch.optim.Muon` the momentum stays in shards, a process has one whole matrix at a time, and each
    matrix travels at most twice in a step, and once more for each further replica of the shards. Any other optimizer
    keeps its state of a matrix on the owner; gradient and parameter travel to the owner, and the parameter back.

    Args:
        optimizer: an optimizer that `prepare` returned, or that of a model which the script has sharded itself.

    Raises:
        Conflict: the optimizer has already stepped, and its state belongs to shards.

    Example:
        >>> model, optimizer = accelerator.prepare(model, torch.optim.Muon(model.parameters()))
        >>> WholeMatrices(optimizer)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        inner: Any = inner_optimizer(optimizer)
        self._is_muon = type(inner) is Muon
        if inner.state and not self._is_muon:
            raise Conflict(
                f"Cannot use WholeMatrices with {type(inner).__name__}.",
                "The optimizer has already stepped, and its state belongs to shards of matrices.",
                "Create WholeMatrices after prepare(), before the first step and before load_state().",
            )
        self._optimizer = weakref.ref(inner)
        # A copy of an optimizer has its options, its groups and its state, but none of its other attributes.
        self._worker: Any = copy.copy(inner)
        vars(self._worker).update({key: value for key, value in vars(inner).items() if key not in vars(self._worker)})
        self._worker.state = defaultdict(dict)
        self._planned: list[int] = []
        self._rounds: list[list[OwnedMatrix]] = []
        self._gradients: list[tuple[Any, Tensor]] = []
        self._handles = [inner.register_step_pre_hook(self._before), inner.register_step_post_hook(self._after)]
        session = next((one for one in open_sessions() if optimizer in one.prepared.optimizers), None)
        if session is not None and not self._is_muon:
            self._enter(session, session.prepared.optimizers.index(optimizer))

    def remove(self) -> None:
        """Let the optimizer step shards again."""
        for handle in self._handles:
            handle.remove()

    # ------------------------------------------------------------------ a step

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise NotOffered(
                "Cannot call step(closure) with WholeMatrices.",
                "The matrices are stepped before the closure would compute their gradients.",
                "Call step() without a closure, or WholeMatrices.remove().",
            )
        for planned in self._plan(optimizer):
            matrices = [matrix for matrix in planned if matrix.parameter.grad is not None]
            if matrices:
                self._step(optimizer, matrices)

    def _after(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()

    def _step(self, optimizer: Optimizer, matrices: list[OwnedMatrix]) -> None:
        """Step the matrices of a round, and hide their gradients from the optimizer's own step."""
        gradient = to_owners(matrices, [self._input(optimizer, matrix) for matrix in matrices])
        weight = None if self._is_muon else to_owners(matrices, [own_part(one.parameter) for one in matrices])
        mine = next((matrix for matrix in matrices if matrix.is_mine), None)
        if mine is not None and gradient is not None:
            mine.whole.data = torch.zeros_like(gradient) if weight is None else weight
            mine.whole.grad = gradient
            options = {**optimizer.param_groups[mine.index], "params": [mine.whole]}
            self._worker.param_groups = [{**options, **_ORTHOGONALISES_ONLY} if self._is_muon else options]
            type(self._worker).step(self._worker)
            if self._is_muon:
                self._worker.state.clear()
        results = from_owners(matrices, None if mine is None else mine.whole.data)
        if mine is not None:
            mine.whole.data, mine.whole.grad = torch.empty(0), None
        for matrix, result in zip(matrices, results, strict=True):
            shard, options = own_part(matrix.parameter), optimizer.param_groups[matrix.index]
            if self._is_muon:
                shard.mul_(1 - options["lr"] * options["weight_decay"]).add_(result.to(shard.device))
            else:
                shard.copy_(result)
            self._gradients.append((matrix.parameter, matrix.parameter.grad))
            matrix.parameter.grad = None

    def _input(self, optimizer: Optimizer, matrix: OwnedMatrix) -> Tensor:
        """What the owner needs of this process: its shard of the gradient, with that of Muon's momentum."""
        parameter = matrix.parameter
        gradient = parameter.grad
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        shard = own_part(gradient)
        if not self._is_muon:
            return shard
        options, state = optimizer.param_groups[matrix.index], optimizer.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = own_part(state["momentum_buffer"]).lerp_(shard, 1 - options["momentum"])
        return shard.lerp(buffer, options["momentum"]) if options["nesterov"] else buffer

    def _plan(self, optimizer: Optimizer) -> list[list[OwnedMatrix]]:
        """The rounds of matrices; chosen again when the optimizer has other parameters."""
        sharded = [
            (index, parameter)
            for index, options in enumerate(optimizer.param_groups)
            for parameter in options["params"]
            if is_sharded_matrix(parameter)
        ]
        if [id(parameter) for _, parameter in sharded] != self._planned:
            self._rounds = rounds_of(sharded)
            self._planned = [id(parameter) for _, parameter in sharded]
        return self._rounds

    # ------------------------------------------------------------------ checkpoints

    def _enter(self, session: Session, number: int) -> None:
        """Save and load the states of whole matrices with the session's checkpoints."""
        referred, name = weakref.ref(self), whole_matrices_name(number)

        def save(models: Sequence[Module], weights: Any, folder: str) -> None:
            if (own := referred()) is not None:
                own.write_into(Path(folder, name), models)

        def load(models: Sequence[Module], folder: str) -> None:
            if (own := referred()) is not None:
                own.read_from(Path(folder, name), models)

        self._handles += [add_hook(session.prepared.save_hooks, save), add_hook(session.prepared.load_hooks, load)]

    def write_into(self, folder: Path, models: Sequence[Module]) -> None:
        """Write the states of the matrices that this process owns; called on every process by `save_state`."""
        folder.mkdir(exist_ok=True)
        states = self._worker.state
        own = {name: states[one.whole] for name, one in self._named(models).items() if one.whole in states}
        pickled.write(own, folder / f"owner_{dist.get_rank()}.pkl")

    def read_from(self, folder: Path, models: Sequence[Module]) -> None:
        """Read the states of the matrices that this process owns now; called on every process by `load_state`.

        Raises:
            CheckpointError: the checkpoint has no states of whole matrices.
        """
        files = sorted(folder.glob("owner_*.pkl"))
        if not files:
            raise CheckpointError(
                f"Cannot load the state of an optimizer with WholeMatrices from {folder.parent}.",
                f"It has no {folder.name}: the run that saved it stepped shards.",
                "Resume without WholeMatrices, or from a checkpoint of a run with it.",
            )
        states = self._worker.state
        states.clear()
        own = {name: one for name, one in self._named(models).items() if one.is_mine}
        for file in files:
            for name, state in pickled.read(file).items():
                if name in own:
                    device = own[name].parameter.device_mesh.device_type
                    states[own[name].whole] = _on(device, state)

    def _named(self, models: Sequence[Module]) -> dict[str, OwnedMatrix]:
        """The matrices by index of their model and name."""
        optimizer = self._optimizer()
        matrices = [] if optimizer is None else [one for together in self._plan(optimizer) for one in together]
        names = {one: f"{i}.{name}" for i, model in enumerate(models) for one, name in parameter_names(model).items()}
        return {names[matrix.parameter]: matrix for matrix in matrices}


def _on(device: str, state: Any) -> Any:
    """Copies of the tensors of nested containers, on a device."""
    if isinstance(state, Tensor):
        return state.to(device, copy=True)
    if isinstance(state, dict):
        return {key: _on(device, value) for key, value in state.items()}
    return type(state)(_on(device, value) for value in state) if isinstance(state, (list, tuple)) else state
