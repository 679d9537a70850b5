"""Settings of the replicas of a run; without torch, because the launcher reads them too.

Environment variables that torchft reads itself have its names: `TORCHFT_LIGHTHOUSE`, `REPLICA_GROUP_ID`,
`NUM_REPLICA_GROUPS`.
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
"""Name or address of this machine for other replicas; its host name if not set."""

JOINED_VARIABLE: Final = "ACCEL_TORCHFT_JOINED"
"""File that a replica creates for the launcher after its first step."""

LEFT: Final = ".left"
"""Suffix for the name of the file that a replica creates when it leaves the others."""

RESTARTED_VARIABLE: Final = "ACCEL_TORCHFT_RESTARTED"
"""Not empty for a restarted replica."""

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
    """Settings of the replicas of a run: their number, time limits and training mode.

    Args:
        replica_groups: number of replicas of the whole run. The batches of an optimizer step are those of all replicas,
            however many are alive.
        replica_group_id: number of this process's replica; the launcher sets it.
        lighthouse: address of the lighthouse. With None, the launcher starts one.
        replicas: numbers of the replicas that a launch starts on its machine. None starts all.
        min_replicas: smallest number of replicas with which the run continues.
        timeout: time limit in seconds for a transfer of gradients or of the state of a replica.
        quorum_timeout: time limit in seconds for the replicas to agree on the members of a step.
        heartbeat_timeout: seconds without a heartbeat after which a replica counts as dead.
        join_timeout: seconds that a step waits for a live replica that does not join.
        bucket_mb: size of gradient buckets in MiB.
        mode: how the replicas train together: "ddp", "local_sgd" or "diloco". It selects the backend if these settings
            are given as an object; otherwise the backend's name selects the mode.
        sync_every: local optimizer steps of each replica between two exchanges, with "local_sgd" and "diloco". The four
            time limits above are those of one step, and are multiplied by this number for a round.
        outer_lr: learning rate of DiLoCo's outer optimizer, SGD over the mean change of the replicas' weights.
        outer_momentum: Nesterov momentum of the outer optimizer.
        restarts: number of restarts of killed replicas in the whole run.

    Raises:
        SettingError: a time limit or the outer learning rate is not positive, or the momentum is not in [0, 1).
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
                self._refuse(name, "The value must be a time in seconds.", "Give a number above 0.")
        if not self.outer_lr > 0:
            self._refuse("outer_lr", "The value must be a learning rate.", "Give a number above 0, such as 0.7.")
        if not 0 <= self.outer_momentum < 1:
            self._refuse(
                "outer_momentum",
                "The value must be a momentum.",
                "Give a number of at least 0 and below 1, such as 0.9.",
            )
        if self.mode not in _BACKEND_NAMES:
            self._refuse("mode", f"There are {', '.join(_BACKEND_NAMES)}.", "Give one of these.")
        if self.min_replicas > self.replica_groups:
            raise Conflict(
                f"Cannot use min_replicas={self.min_replicas} and replica_groups={self.replica_groups} together.",
                "The run can never have enough replicas.",
                "Increase replica_groups, or decrease min_replicas.",
            )

    def _refuse(self, name: str, obstacle: str, remedy: str) -> NoReturn:
        raise SettingError(f"Cannot use TorchFTConfig({name}={getattr(self, name)!r}).", obstacle, remedy)

    @property
    def backend_name(self) -> str:
        """Name of the backend for these settings, with one process per replica."""
        return _BACKEND_NAMES[self.mode]
