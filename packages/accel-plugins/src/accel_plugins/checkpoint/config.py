"""Where a project keeps its checkpoints and logs; plain data, without torch."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import TYPE_CHECKING

from accel_state.errors import Conflict, SettingError

if TYPE_CHECKING:
    from accel_plugins.checkpoint.save_policy import ContinuousSavePolicy

__all__ = ("ProjectConfiguration",)


@dataclass
class ProjectConfiguration:
    """Folders of a project and how its checkpoints are kept.

    Args:
        project_dir: folder of the project; the current one where a folder is needed and none was given.
        logging_dir: folder for trackers; that of the project by default.
        automatic_checkpoint_naming: save as `<project_dir>/checkpoints/checkpoint_<iteration>`.
        total_limit: checkpoints to keep; older ones are removed after a newer one is complete. None keeps all.
        iteration: number of the next automatic checkpoint.
        save_on_each_node: write on every node what the main process writes, for nodes that share no file system.
        iteration_checkpoints: another spelling of `automatic_checkpoint_naming=True`.
        fsync: wait until the disk holds a checkpoint before it counts; False trusts the page cache.
        verify: what is compared with the manifest before anything is loaded: "hashes", or "sizes" alone, which does
            not see a byte that was flipped.
        deadline: seconds that processes wait for each other while saving.
        remote: URL of a place that each checkpoint is copied to after it was saved, in the background: `s3://bucket/run`,
            `gs://`, `az://` (extra `accel-plugins[remote]`) or `file://`. One run writes to one URL. `load_state()`
            takes the newest checkpoint of both places.
        save_policy: save without a call of `save_state`, between the steps of a loop over a prepared loader, see
            `ContinuousSavePolicy`; needs automatic naming, and takes the place of `total_limit`.
        save_on_signal: on SIGTERM or SIGUSR1 to any process, save between two batches of a prepared loader and end with
            exit code 75 (`accel_state.exit_codes.RESUME`), which `accel launch` passes on; needs automatic naming.

    Raises:
        SettingError: a number or a word cannot be used.
        Conflict: `save_policy` and `total_limit` are given together.
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
        rules = {
            "total_limit": (self.total_limit is None or self.total_limit >= 1, "at least 1, or None to keep all"),
            "iteration": (self.iteration >= 0, "at least 0"),
            "verify": (self.verify in ("sizes", "hashes"), "'sizes' or 'hashes'"),
            "deadline": (self.deadline > 0, "a positive number of seconds"),
            "remote": (
                self.remote is None or (isinstance(self.remote, str) and "://" in self.remote),
                "a URL, such as 's3://bucket/run'",
            ),
            "save_policy": (
                self.automatic_checkpoint_naming or self.save_policy is None,
                "given together with automatic_checkpoint_naming=True, which says what the checkpoints are called",
            ),
            "save_on_signal": (
                self.automatic_checkpoint_naming or not self.save_on_signal,
                "given together with automatic_checkpoint_naming=True, which says what the checkpoint is called",
            ),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise SettingError(
                    f"Cannot use ProjectConfiguration({name}={getattr(self, name)!r}).",
                    f"The value must be {rule}.",
                    "Remove it for the default.",
                )

        if self.save_policy is not None and self.total_limit is not None:
            raise Conflict(
                "Cannot use ProjectConfiguration(save_policy=..., total_limit=...).",
                "The policy already decides which checkpoints stay.",
                "Leave total_limit out, and give ContinuousSavePolicy(keep_last=...).",
            )

    @property
    def retention(self) -> tuple[int | None, float | None]:
        """How many of the newest automatically named checkpoints stay, and of which period one of the older ones."""
        if self.save_policy is not None:
            return self.save_policy.keep_last, self.save_policy.period
        return (self.total_limit if self.automatic_checkpoint_naming else None), None

    def set_directories(self, project_dir: str | None = None) -> None:
        """Use this folder, also for logs where they have none of their own."""
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if self.logging_dir is None:
            self.logging_dir = self.project_dir
