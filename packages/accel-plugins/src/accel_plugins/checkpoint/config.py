"""The folders of a project and its checkpoints: plain data, without torch."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import TYPE_CHECKING

from accel_state.errors import Conflict, SettingError
from accel_state.settings.integers import as_int

if TYPE_CHECKING:
    from accel_plugins.checkpoint.save_policy import ContinuousSavePolicy

__all__ = ("ProjectConfiguration",)


@dataclass
class ProjectConfiguration:
    """The folders of a project, and how its checkpoints are saved and removed.

    Args:
        project_dir: folder of the project; None: the current folder, if one is needed.
        logging_dir: folder for trackers; by default the project's folder.
        automatic_checkpoint_naming: save as `<project_dir>/checkpoints/checkpoint_<iteration>`.
        total_limit: number of checkpoints to keep; older ones are removed after a newer one is complete. None: keep
            all; 0 counts as 1, because the newest one stays.
        iteration: number of the next automatic checkpoint.
        save_on_each_node: write the main process's files on every node, for nodes without a shared file system.
        iteration_checkpoints: another spelling of `automatic_checkpoint_naming=True`.
        fsync: flush a checkpoint to disk before it becomes valid; False: do not flush the page cache.
        verify: compare files with the manifest before loading: "hashes", or only "sizes", which does not detect flipped
            bits.
        deadline: maximum time in seconds that processes wait for each other while saving.
        remote: URL to which each saved checkpoint is copied in the background: `s3://bucket/run`, `gs://`, `az://`
            (extra `accel-plugins[remote]`) or `file://`. One run writes to one URL. `load_state()` loads the newest
            checkpoint of both places.
        save_policy: save automatically between the steps of a loop over a prepared loader, see `ContinuousSavePolicy`.
            Needs automatic naming, and replaces `total_limit`.
        save_on_signal: after SIGTERM or SIGUSR1 to any process, save between two batches of a prepared loader and exit
            with code 75 (`accel_state.exit_codes.RESUME`), which is also the exit code of `accel launch`. Needs
            automatic naming.

    Raises:
        SettingError: a value is invalid.
        Conflict: both `save_policy` and `total_limit` are set.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    _: KW_ONLY
    iteration_checkpoints: InitVar[bool] = False
    fsync: bool = True
    verify: str = "hashes"
    deadline: float = 600.0
    save_on_signal: bool = False
    remote: str | None = None
    save_policy: ContinuousSavePolicy | None = None

    def __post_init__(self, iteration_checkpoints: bool) -> None:
        self.automatic_checkpoint_naming |= iteration_checkpoints
        self.set_directories(self.project_dir)
        limit, iteration = as_int(self.total_limit), as_int(self.iteration)
        rules = {
            "total_limit": (
                self.total_limit is None or (limit is not None and limit >= 0),
                "an integer of at least 1, or None to keep all",
            ),
            "iteration": (iteration is not None and iteration >= 0, "an integer of at least 0"),
            "verify": (self.verify in ("sizes", "hashes"), "'sizes' or 'hashes'"),
            "deadline": (self.deadline > 0, "a positive number of seconds"),
            "remote": (
                self.remote is None or (isinstance(self.remote, str) and "://" in self.remote),
                "a URL, such as 's3://bucket/run'",
            ),
            "save_policy": (
                self.automatic_checkpoint_naming or self.save_policy is None,
                "used together with automatic_checkpoint_naming=True, which determines the names of checkpoints",
            ),
            "save_on_signal": (
                self.automatic_checkpoint_naming or not self.save_on_signal,
                "used together with automatic_checkpoint_naming=True, which determines the name of the checkpoint",
            ),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise SettingError(
                    f"Cannot use ProjectConfiguration({name}={getattr(self, name)!r}).",
                    f"The value must be {rule}.",
                    "Change it, or remove it to use the default.",
                )

        self.total_limit, self.iteration = limit, iteration or 0
        if self.save_policy is not None and self.total_limit is not None:
            raise Conflict(
                "Cannot use ProjectConfiguration(save_policy=..., total_limit=...).",
                "The policy already determines which checkpoints to keep.",
                "Remove total_limit, and set ContinuousSavePolicy(keep_last=...).",
            )

    @property
    def retention(self) -> tuple[int | None, float | None]:
        """How many of the newest automatic checkpoints to keep, and at which interval to keep older ones."""
        if self.save_policy is not None:
            return self.save_policy.keep_last, self.save_policy.period
        limit = self.total_limit if self.automatic_checkpoint_naming else None
        # The newest one stays in any case.
        return (None if limit is None else max(limit, 1)), None

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project folder, also as folder for logs if none is set."""
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir
