"""Settings of the replicas of a run: plain data without torch, which the launcher reads too.

Variables that torchft reads itself have its names: `TORCHFT_LIGHTHOUSE`, `REPLICA_GROUP_ID`, `NUM_REPLICA_GROUPS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn

from accel_state.errors import Conflict, SettingError
from accel_state.kwargs import KwargsHandler
from accel_state.settings.schema import FLOAT, INTEGER, choice, int_at_least, listing, setting

__all__ = (
    "HOST_VARIABLE",
    "JOINED_VARIABLE",
    "LEFT",
    "LIGHTHOUSE_VARIABLE",
    "REPLICA_VARIABLE",
    "RESTARTED_VARIABLE",
    "TorchFTConfig",
)

HOST_VARIABLE: Final = "ACCEL_TORCHFT_HOST"
"""Name or address under which other replicas reach this machine; its host name where it is not set."""

JOINED_VARIABLE: Final = "ACCEL_TORCHFT_JOINED"
"""File that a replica makes once it has taken part in a step, for the launcher."""

LEFT: Final = ".left"
"""What is appended to the name of that file for the one that a replica makes when it leaves the others."""

RESTARTED_VARIABLE: Final = "ACCEL_TORCHFT_RESTARTED"
"""Not empty for a replica that was started again."""

LIGHTHOUSE_VARIABLE: Final = "TORCHFT_LIGHTHOUSE"
"""Address of the lighthouse, such as "http://node0:29510"."""

REPLICA_VARIABLE: Final = "REPLICA_GROUP_ID"
"""Number of the replica that a process belongs to."""

_BACKEND_NAMES: Final = {"ddp": "torchft", "local_sgd": "torchft-local-sgd", "diloco": "torchft-diloco"}

_setting = partial(
    setting,
    variable="ACCEL_TORCHFT_{NAME}",
    flag="--torchft_{name}",
    key="torchft_config.{name}",
    group="Replicas (torchft)",
)


@dataclass
class TorchFTConfig(KwargsHandler):
    """How replicas of a run find each other, and how long they wait for each other.

    Args:
        replica_groups: replicas of the whole run. Every optimizer step has that many batches of each process, however
            many replicas are alive.
        replica_group_id: which of them this process belongs to; the launcher sets it.
        lighthouse: address of the lighthouse; the launcher starts one when None.
        replicas: numbers of the replicas that a launch starts on its machine; all of them when None.
        min_replicas: with fewer replicas, no replica continues.
        timeout: time limit in seconds for a transfer of gradients or of the state of a replica.
        quorum_timeout: time limit in seconds for the replicas to agree on the members of a step.
        heartbeat_timeout: seconds without a heartbeat after which a replica counts as dead.
        join_timeout: seconds that a step waits for a live replica that does not join.
        bucket_mb: size in MiB of the buckets in which gradients travel.
        mode: how the replicas train together: "ddp", "local_sgd" or "diloco". It chooses the backend where these
            settings are given as an object; otherwise the name of the backend says it.
        sync_every: optimizer steps that each replica makes alone between two exchanges, with "local_sgd" and "diloco".
            The four times above are those of one step: a round of local steps may take so many times as long.
        outer_lr: learning rate of DiLoCo's outer optimizer, SGD over the mean of what the replicas changed.
        outer_momentum: its Nesterov momentum.
        restarts: how often the launcher starts a killed replica again, over the whole run.

    Raises:
        SettingError: a time or the outer learning rate is not positive, or the momentum is not in [0, 1).
        Conflict: there are fewer replicas than `min_replicas`.

    Example:
        >>> TorchFTConfig(replica_groups=4, heartbeat_timeout=2.0).replica_groups
        4
    """

    replica_groups: int = _setting(
        1,
        type=int_at_least(1),
        variable="NUM_{NAME}",
        flag="--{name}",
        help="Number of replicas; each is a group of --num_processes processes.",
    )
    replica_group_id: int | None = _setting(
        None,
        type=INTEGER,
        variable=REPLICA_VARIABLE,
        flag=None,
        help="Number of the replica; the launcher sets it.",
    )
    lighthouse: str | None = _setting(
        None,
        variable=LIGHTHOUSE_VARIABLE,
        help="Address of a running lighthouse, such as http://node0:29510.",
    )
    replicas: tuple[int, ...] | None = _setting(
        None,
        type=listing(INTEGER),
        help="Replicas to start on this machine, such as 2,3; all by default.",
    )
    min_replicas: int = _setting(
        1,
        type=int_at_least(1),
        help="Smallest number of replicas with which the run continues.",
    )
    timeout: float = _setting(
        60.0,
        type=FLOAT,
        help="Time limit in seconds for a transfer of gradients or of the state of a replica.",
    )
    quorum_timeout: float = _setting(
        60.0,
        type=FLOAT,
        help="Time limit in seconds for the replicas to agree on the members of a step.",
    )
    heartbeat_timeout: float = _setting(
        5.0,
        type=FLOAT,
        help="Seconds without a heartbeat after which a replica counts as dead.",
    )
    join_timeout: float = _setting(
        60.0,
        type=FLOAT,
        help="Seconds that a step waits for a live replica that does not join.",
    )
    bucket_mb: int = _setting(
        25,
        type=int_at_least(1),
        help="Size of gradient buckets in MiB.",
    )
    mode: str = setting("ddp", type=choice(*_BACKEND_NAMES))
    sync_every: int = _setting(
        100,
        type=int_at_least(1),
        help="Steps between two exchanges of weights (LocalSGD, DiLoCo).",
    )
    outer_lr: float = _setting(
        0.7,
        type=FLOAT,
        help="Learning rate of the outer optimizer (DiLoCo).",
    )
    outer_momentum: float = _setting(
        0.9,
        type=FLOAT,
        help="Nesterov momentum of the outer optimizer (DiLoCo).",
    )
    restarts: int = _setting(
        100,
        type=int_at_least(0),
        help="Number of restarts of killed replicas in the whole run.",
    )

    def __post_init__(self) -> None:
        for name in ("timeout", "quorum_timeout", "heartbeat_timeout", "join_timeout"):
            if not getattr(self, name) > 0:
                self._refuse(name, "It is a time in seconds.", "Give a number above 0.")
        if not self.outer_lr > 0:
            self._refuse("outer_lr", "It is a learning rate.", "Give a number above 0, such as 0.7.")
        if not 0 <= self.outer_momentum < 1:
            self._refuse("outer_momentum", "It is a momentum.", "Give a number from 0 to below 1, such as 0.9.")
        if self.mode not in _BACKEND_NAMES:
            self._refuse("mode", f"There are {', '.join(_BACKEND_NAMES)}.", "Give one of these.")
        if self.min_replicas > self.replica_groups:
            raise Conflict(
                f"Cannot use min_replicas={self.min_replicas} and replica_groups={self.replica_groups} together.",
                "The run can never have as many replicas as it needs.",
                "Start more replicas, or need fewer.",
            )

    def _refuse(self, name: str, obstacle: str, remedy: str) -> NoReturn:
        raise SettingError(f"Cannot use TorchFTConfig({name}={getattr(self, name)!r}).", obstacle, remedy)

    @property
    def backend_name(self) -> str:
        """Name of the backend that these settings are for, with one process a replica."""
        return _BACKEND_NAMES[self.mode]
