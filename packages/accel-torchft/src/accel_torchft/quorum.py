"""The quorum of replicas: the members of each step, whether a step counts, and the recovery of a replica.

All three are implemented by `torchft.Manager`; this module adds errors that name what failed.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from torch import Tensor
from torch.distributed import TCPStore, Work  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL, ProcessGroupXCCL
from torchft.checkpointing import HTTPTransport
from torchft.process_group import ProcessGroup

from accel_ops import broadcast_object_list, send_to_device
from accel_state.current import Process
from accel_state.devices.select import family_of
from accel_state.errors import CollectiveError, NotReady
from accel_torchft.config import (
    HOST_VARIABLE,
    JOINED_VARIABLE,
    LEFT,
    LIGHTHOUSE_VARIABLE,
    RESTARTED_VARIABLE,
    TorchFTConfig,
)

__all__ = ("Quorum", "QuorumMembers", "lighthouse_of")

_MAX_RETRIES: Final = 100
"""The run ends with an error after this many steps in a row that do not count."""

_MAX_ALONE_S: Final = 5.0
"""Seconds for which a restarted replica waits for others before it continues without them."""

_ALONE_PAUSE_S: Final = 0.5

_MAX_MISSING_HEARTBEATS: Final = 10
"""A replica counts as dead after this many missing heartbeats."""

_PROCESS_GROUPS: Final = {"nccl": ProcessGroupNCCL, "xccl": ProcessGroupXCCL}
"""Process groups between replicas, by the device's communication backend; gloo is used for all others."""


@dataclass(frozen=True)
class QuorumMembers:
    """The replicas that make a step.

    Args:
        step: number of steps that the run has made.
        count: number of members.
        index: index of this replica among the members, from 0.
    """

    step: int
    count: int
    index: int


class _ReplicaManager(Manager):  # type: ignore[misc] # torchft is not everywhere that types are checked
    """torchft's manager with two changes: it forms the quorum before samples are drawn, and its errors name a remedy.

    torchft's classes for local steps request a quorum when they synchronise weights. Here they use the quorum that was
    formed when the round of local steps began.
    """

    def __init__(self, groups: ProcessGroup, **options: Any) -> None:
        super().__init__(groups, **options)
        self._groups = groups

    def start_quorum(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: `agree` forms the quorum instead."""

    def agree(self) -> None:
        """Agree on the members of the next step. A replica that is behind loads another member's state."""
        super().start_quorum()

    def allreduce(self, tensor: Tensor, *arguments: Any, **options: Any) -> Work:
        """Begin to reduce a tensor; with gloo, a tensor on a device is copied to host memory and back."""
        in_host = tensor.cpu() if isinstance(self._groups, ProcessGroupGloo) else tensor
        sent: Work = super().allreduce(in_host, *arguments, **options)
        if in_host is not tensor:
            sent.wait()
            tensor.copy_(in_host)
        return sent

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Whether the step counts; see `Quorum.commit`."""
        failed = self.errored()
        if failed is not None:
            # Otherwise members that wait for this one in the same all-reduce would notice only after the timeout.
            self._groups.abort()
        try:
            return bool(super().should_commit(timeout))
        except (RuntimeError, TimeoutError) as error:
            why = "" if failed is None else f": {failed.original_exception!r}"
            raise CollectiveError(
                f"Cannot end step {self.current_step()} of the run.",
                f"{_text(error)}{why}",
                "Check the output of the other replicas for the reason why they ended.",
            ) from None


class _StateTransport(HTTPTransport):  # type: ignore[misc] # torchft is not everywhere that types are checked
    """Sends a replica's state to one that joins, from host memory on every type of device."""

    def __init__(self, timeout: timedelta, num_chunks: int, host: str) -> None:
        self._host = host
        super().__init__(timeout, num_chunks)
        handler = getattr(getattr(self, "_server", None), "RequestHandlerClass", None)
        if handler is not None:
            # The server would print a line to the user's terminal for each state that it sends.
            handler.log_request = lambda request, code="-", size="-": None

    def address(self) -> str:
        """The address at which other replicas reach this one; it may differ from the machine's host name."""
        scheme, _, rest = super().address().partition("://")
        return f"{scheme}://{self._host}:{rest.rpartition(':')[2]}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        super().send_checkpoint(dst_ranks, step, send_to_device(state_dict, "cpu"), timeout)

    def shutdown(self, wait: bool = True) -> None:
        """End the server and close its socket, which torchft leaves to the garbage collector."""
        super().shutdown(wait)
        server = getattr(self, "_server", None)
        if server is not None:
            server.server_close()


class Quorum:
    """The membership of this process's replica in the run.

    Args:
        process: this process in its replica.
        config: settings of the replicas, such as the lighthouse and the timeouts.
        state_dict: returns the state to send to a replica that joins.
        load_state_dict: loads such a state.
        step: steps that the run made before this process started, for example before its checkpoint.
        length: optimizer steps per quorum; the timeouts of `config` are per optimizer step and are multiplied by it.
    """

    def __init__(
        self,
        process: Process,
        config: TorchFTConfig,
        state_dict: Callable[[], dict[str, Any]],
        load_state_dict: Callable[[dict[str, Any]], None],
        step: int = 0,
        length: int = 1,
    ) -> None:
        self._config = config
        self._quorum_timeout = config.quorum_timeout * length
        _quieten()
        for other in list(_open_quorums):
            # The lighthouse would wait for an old member of this process that makes no more steps.
            other.close()
        timeout = timedelta(seconds=config.timeout * length)
        self._groups = _PROCESS_GROUPS.get(family_of(process.device).spec.backend, ProcessGroupGloo)(timeout=timeout)
        host = os.environ.get(HOST_VARIABLE) or socket.gethostname()
        self._store, port = _store(process, host)
        lighthouse = lighthouse_of(config)
        try:
            self._manager = _ReplicaManager(
                self._groups,
                state_dict=state_dict,
                load_state_dict=load_state_dict,
                min_replica_size=config.min_replicas,
                # The members of a step must be known before its samples are drawn.
                use_async_quorum=False,
                timeout=timeout,
                quorum_timeout=timedelta(seconds=self._quorum_timeout),
                connect_timeout=timedelta(seconds=config.quorum_timeout),
                rank=process.rank,
                world_size=process.world_size,
                store_addr=host,
                store_port=port,
                lighthouse_addr=lighthouse,
                replica_id=f"replica_{config.replica_group_id or 0}",
                hostname=host,
                heartbeat_interval=timedelta(seconds=config.heartbeat_timeout / _MAX_MISSING_HEARTBEATS),
                checkpoint_transport=_StateTransport(timeout, 0, host),
                max_retries=_MAX_RETRIES,
            )
        except (RuntimeError, TimeoutError, OSError) as error:
            raise CollectiveError(
                f"Cannot join the replicas of the run through the lighthouse {lighthouse}.",
                f"It does not answer: {_text(error)}",
                f"Start the run with `accel launch --backend torchft`, or correct ${LIGHTHOUSE_VARIABLE}.",
            ) from None
        self._manager.load_state_dict({"step": step, "batches_committed": 0})
        self._joined = os.environ.get(JOINED_VARIABLE, "") if process.rank == 0 else ""
        self._has_joined = False
        _open_quorums.add(self)
        self._patience = _MAX_ALONE_S if os.environ.get(RESTARTED_VARIABLE) else 0.0

    @property
    def manager(self) -> Manager:
        """The manager of torchft, which starts quorums and reduces between replicas."""
        return self._manager

    @property
    def step(self) -> int:
        """Number of steps of the whole run that count."""
        return int(self._manager.current_step())

    @step.setter
    def step(self, step: int) -> None:
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def begin(self) -> QuorumMembers:
        """Agree on the members of the next step; a replica that rejoins has loaded the others' state afterwards.

        Raises:
            CollectiveError: the lighthouse does not answer, or too few replicas join in time.
        """
        self._agree()
        # The others may just have finished. Then the launcher ends this replica, which would start from step 0.
        while self._manager.num_participants() == 1 and self._patience > 0:
            self._patience -= _ALONE_PAUSE_S
            time.sleep(_ALONE_PAUSE_S)
            self._agree()
        self._patience = 0.0
        rank = self._manager.participating_rank()
        return QuorumMembers(self.step, max(self._manager.num_participants(), 1), 0 if rank is None else rank)

    def _agree(self) -> None:
        try:
            self._manager.agree()
        except (RuntimeError, TimeoutError) as error:
            raise self._no_quorum(error) from None

    def _no_quorum(self, error: Exception) -> CollectiveError:
        config = self._config
        return CollectiveError(
            f"Cannot begin step {self.step} of the run.",
            f"The lighthouse {lighthouse_of(config)} did not form a quorum of at least {config.min_replicas} "
            "replica(s) "
            f"within {self._quorum_timeout:g} s: {_text(error)}",
            "Check that the lighthouse and the other replicas run, or increase --torchft_quorum_timeout.",
        )

    def average(self, tensor: Tensor) -> Work:
        """Begin to replace a tensor by its mean over the members; a failure is reported by `commit`."""
        sent: Work = self._manager.allreduce(tensor)
        return sent

    def commit(self) -> bool:
        """End a step; return whether it counts, which is when no member was lost during it.

        Raises:
            CollectiveError: too many steps in a row did not count.
        """
        counts = self._manager.should_commit()
        if counts:
            self.note_joined()
        return counts

    def note_joined(self) -> None:
        """Report to the launcher that this replica has taken part in a step; further calls do nothing."""
        if not self._has_joined:
            self._has_joined = True
            self._note("")
            if self._joined:
                # An earlier quorum of this process may have written this file.
                Path(self._joined + LEFT).unlink(missing_ok=True)

    def _note(self, suffix: str) -> None:
        """Write a file whose time of change the launcher reads."""
        if self._joined:
            with open(self._joined + suffix, "w", encoding="utf-8") as file:
                file.write(f"{os.getpid()}\n")

    def close(self) -> None:
        """Leave the quorum; further calls do nothing."""
        if self not in _open_quorums:
            return
        _open_quorums.discard(self)
        self._note(LEFT)
        self._manager.shutdown(wait=False)
        self._groups.shutdown()


_open_quorums: Final[weakref.WeakSet[Quorum]] = weakref.WeakSet()
"""The open quorum of this process, if any."""


def _quieten() -> None:
    """Silence torchft's logs of failures from which it recovers, unless the user has set a log level for it."""
    engine = logging.getLogger("torchft")
    if engine.level == logging.NOTSET:
        engine.setLevel(logging.CRITICAL)
    # This warning does not matter: a received state is copied at once.
    warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
    # With `python -W error` this warning would be an error, and no step would count.
    warnings.filterwarnings("ignore", "The 'warn' method is deprecated", DeprecationWarning, "torchft")


def _text(error: Exception) -> str:
    """The message of a torchft error, without the headers of the response."""
    return str(error).partition(", details:")[0].strip()


def lighthouse_of(config: TorchFTConfig) -> str:
    """Address of the lighthouse.

    Raises:
        NotReady: neither the settings nor the environment contain it.
    """
    address = config.lighthouse or os.environ.get(LIGHTHOUSE_VARIABLE)
    if not address:
        raise NotReady(
            "Cannot train with replicas (backend 'torchft').",
            "The address of the lighthouse, through which the replicas find each other, is missing.",
            "Start the script with `accel launch --backend torchft --replica_groups N`.",
        )
    return address


def _store(process: Process, host: str) -> tuple[TCPStore | None, int]:
    """The store of a replica's processes, and its port. Only the first process runs it; others return None."""
    served = None
    if process.rank == 0:
        served = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    port = 0 if served is None else served.port
    if process.world_size > 1:
        port = int(broadcast_object_list([port])[0])
    return served, port
