"""The strategy of a process in a replica that may die and rejoin while the others continue.

Every replica has the complete state of the run. Before each optimizer step the replicas agree on its members, which
share the samples of the step. If a member is lost during a step, the step counts on no replica, and the others repeat
it. The all-reduce, the quorum and the recovery are torchft's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.optim import Optimizer

from accel_data import PreparedLoader
from accel_plugins import BatchShare, Bundle, Context, Strategy
from accel_plugins.fsdp.fsdp2 import FSDP2Strategy
from accel_state.errors import Conflict, NotOffered
from accel_state.settings.environ import from_environment
from accel_torchft.config import TorchFTConfig
from accel_torchft.elastic import StepMembers, check_follows_steps, follow_steps, share_of_batch
from accel_torchft.gradients import GradientBuckets
from accel_torchft.quorum import Quorum, QuorumMembers, lighthouse_of
from accel_torchft.replica_state import ReplicaState

if TYPE_CHECKING:
    from accel_plugins.precision.base import Closure

__all__ = ("OneProcess", "Replicated", "TorchFTFSDP2Strategy", "TorchFTStrategy", "refuse_closure")

_BYTES_PER_MIB = 2**20


class Replicated(Strategy):
    """Mixin for training with replicas; precedes the strategy inside a replica in the list of bases.

    That strategy averages gradients over the processes of a replica, and this class averages them over the replicas.
    """

    def __init__(self, context: Context, config: Any) -> None:
        super().__init__(context, config)
        self._state = ReplicaState(context)
        self._quorum: Quorum | None = None
        self._members: QuorumMembers | None = None
        self._buckets: GradientBuckets | None = None
        self._accumulates = False
        self._averaged = False
        self._first_step = 0
        self._healed_schedules: list[Any] | None = None

    @cached_property
    def replicas(self) -> TorchFTConfig:
        """The settings of the replicas: from the argument, or from the variables that the launcher set."""
        if isinstance(self.config, TorchFTConfig):
            return self.config
        # `config` belongs to the strategy inside a replica; the launcher passes the replicas' settings as variables.
        return from_environment(TorchFTConfig, os.environ)

    # ------------------------------------------------------------------ preparing

    def check(self, bundle: Bundle) -> None:
        lighthouse_of(self.replicas)
        _check_optimizers(len(bundle.optimizers))
        super().check(bundle)

    def setup(self, bundle: Bundle) -> Bundle:
        bundle = super().setup(bundle)
        self._state.add(bundle)
        return bundle

    # ------------------------------------------------------------------ loaders

    def check_loader(self, loader: Any) -> None:
        check_follows_steps(loader)
        super().check_loader(loader)

    def wrap_loader(self, loader: Any) -> Iterable[Any]:
        if isinstance(loader, PreparedLoader):
            follow_steps(loader, self.begin_step, lambda: any(model.training for model in self._state.models))
        return super().wrap_loader(loader)

    def share_of_batch(self, loader: Any) -> BatchShare | None:
        return share_of_batch(loader)

    # ------------------------------------------------------------------ one step

    def begin_step(self) -> StepMembers:
        """Agree on the processes that make the next optimizer step.

        Called by training loaders before they draw the indices of the step's first batch, and again after the last
        step of an epoch. It may be called twice before a step.
        """
        _check_optimizers(len(self._state.optimizers))
        members = self._begin()
        inside = self.shards()
        return StepMembers(
            members.step,
            members.count * inside.count,
            members.index * inside.count + inside.index,
            self.batches_per_step(),
        )

    def batches_per_step(self) -> int:
        return self.replicas.replica_groups * self.shards().count

    def _open(self) -> Quorum:
        """Join the other replicas."""
        return Quorum(self.context.process, self.replicas, self._state.state_dict, self._take_state, self._first_step)

    def _begin(self) -> QuorumMembers:
        """The members of the next step; the same for repeated calls before that step."""
        if self._quorum is None:
            self._quorum = self._open()
        if self._members is None:
            self._members = self._quorum.begin()
            self._renew_buckets()
        elif self._healed_schedules is not None:
            # The script stepped its schedulers in epochs that the others had finished.
            self._state.load_schedules(self._healed_schedules)
        return self._members

    def _renew_buckets(self) -> None:
        """Reset the buckets, or create new ones when other parameters train."""
        trained = self._state.trained
        if self._buckets is not None and [*map(id, trained)] == [*map(id, self._buckets.parameters)]:
            self._buckets.forget()
            return
        self._close_buckets()
        assert self._quorum is not None
        self._buckets = GradientBuckets(
            trained, self.replicas.bucket_mb * _BYTES_PER_MIB, self._quorum.average, self._leaves
        )

    def _leaves(self) -> bool:
        """Whether backward may send buckets: there are several replicas, and this is the last batch of a step."""
        return self._members is not None and self._members.count > 1 and not self._accumulates

    def _close_buckets(self) -> None:
        if self._buckets is not None:
            self._buckets.close()
            self._buckets = None

    def _take_state(self, state: dict[str, Any]) -> None:
        self._state.load_state_dict(state)
        self._healed_schedules = self._state.schedules()

    def no_sync(self, model: Module) -> AbstractContextManager[None]:
        return self._keeping(super().no_sync(model), True)

    def sync_in_next_backward(self, model: Module) -> AbstractContextManager[None]:
        return self._keeping(super().sync_in_next_backward(model), False)

    @contextmanager
    def _keeping(self, inside: AbstractContextManager[None], accumulates: bool) -> Iterator[None]:
        """Wrap a context of the strategy inside a replica; no bucket is sent within when `accumulates`."""
        before, self._accumulates = self._accumulates, accumulates
        try:
            with inside:
                yield
        finally:
            self._accumulates = before

    def finalize_gradients(self, optimizer: Optimizer) -> None:
        super().finalize_gradients(optimizer)
        if self._averaged:
            return
        # A loop that does not read a prepared loader begins its steps here.
        members = self._members or self._begin()
        self._averaged = True
        if members.count > 1 and self._buckets is not None:
            self._buckets.average()

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        refuse_closure(closure)
        self.finalize_gradients(optimizer)
        self._averaged, self._members = False, None
        if self._quorum is None or not self._quorum.commit():
            self._forget_scale()
            return False
        self._healed_schedules = None
        return super().step(optimizer)

    def _forget_scale(self) -> None:
        """Reset the loss scaler's record of overflows in gradients that do not count."""
        scaler = self.context.precision.scaler
        if scaler is not None and scaler.is_enabled():
            scaler.update(scaler.get_scale())
            self.context.precision.scale_by(scaler)

    # ------------------------------------------------------------------ checkpoints

    def extra_state(self, models: Sequence[Module], optimizers: Sequence[Any]) -> Mapping[str, Any]:
        return {
            **super().extra_state(models, optimizers),
            "replica_steps": self._first_step if self._quorum is None else self._quorum.step,
        }

    def load_extra_state(self, state: Mapping[str, Any], models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        self._first_step = int(state["replica_steps"])
        if self._quorum is not None:
            self._quorum.step = self._first_step
        inherited = {name: value for name, value in state.items() if name != "replica_steps"}
        super().load_extra_state(inherited, models, optimizers)

    # ------------------------------------------------------------------ the end

    def release(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        self._state.forget(list(models), list(optimizers))
        self._close_buckets()
        super().release(models, optimizers)

    def close(self) -> None:
        self._close_buckets()
        if self._quorum is not None:
            self._quorum.close()
            self._quorum = None
        super().close()


def refuse_closure(closure: Closure | None) -> None:
    """Raise an error for a step with a closure."""
    if closure is not None:
        raise NotOffered(
            "Cannot step with a closure (accel-torchft).",
            "A closure computes gradients again after the replicas have agreed on the step.",
            "Call step() without a closure.",
        )


def _check_optimizers(count: int) -> None:
    if count > 1:
        raise NotOffered(
            "Cannot train with several optimizers (accel-torchft).",
            "The replicas decide once for each step whether it counts.",
            "Give all parameters to one optimizer, in separate parameter groups.",
        )


class OneProcess(Strategy):
    """The strategy inside a replica of one process, with the whole model."""

    def check(self, bundle: Bundle) -> None:
        processes = self.context.process.world_size
        if processes > 1:
            raise Conflict(
                "Cannot use the replicas of accel-torchft with this backend.",
                f"Each replica must be one process, and this one has {processes}.",
                "Launch with --num_processes 1, or shard the model with the backend 'torchft-fsdp2'.",
            )
        super().check(bundle)


class TorchFTStrategy(Replicated, OneProcess):
    """Replicas of one process each, with the whole model."""

    config: TorchFTConfig


class TorchFTFSDP2Strategy(Replicated, FSDP2Strategy):
    """Replicas of several processes, which shard the model with FSDP 2.

    Each process averages its gradient shards with the processes of the same rank in the other replicas.
    """
