"""Lets a script write into another folder, stop after a step, and note one step, for `accel runs repeat` and `replay`.

The variable `REPEATED_RUN` says what is wanted, so that the script and its command line stay as they are.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_state.errors import SettingError
from accel_state.settings.environ import REPEATED_RUN
from accel_state.watch.record import STATUS_RECORD
from accel_torch.hooks import PROCESS_HOOKS, Hook

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_torch.options import Options
    from accel_torch.session import Session

__all__ = ("RepeatedRun", "follow_request")


def follow_request() -> None:
    """Let every later session of this process follow the request of the variable.

    Raises:
        SettingError: the variable is not valid.
    """
    if any(isinstance(hook, RepeatedRun) for hook in PROCESS_HOOKS):
        return
    try:
        request = json.loads(os.environ[REPEATED_RUN])
        hook = RepeatedRun(**request)
    except (ValueError, TypeError) as error:
        raise SettingError(
            f"Cannot use {REPEATED_RUN}={os.environ[REPEATED_RUN]!r}.",
            f"`accel runs repeat` sets this variable, and it is not valid: {error}.",
            "Remove it.",
        ) from error
    PROCESS_HOOKS.append(hook)


class RepeatedRun(Hook):
    """What a repeated run does otherwise than the recorded one.

    Args:
        folder: the project folder, in place of the script's.
        last_step: the step of the run after which the script ends; None for its own end.
        note: note loss, gradients and weights of the last step in `replay/rank_<rank>.json` of the folder, and let
            torch compute deterministically.
    """

    def __init__(self, folder: str, last_step: int | None = None, note: bool = False) -> None:
        self.folder, self.last_step, self.note = folder, last_step, note
        self._noted: dict[str, Any] = {"losses": [], "gradients": [], "weights": [], "finite": True}
        self._sessions: list[Session] = []
        if note:
            # An operation without a deterministic version warns, and the two replays show whether it matters.
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.backends.cudnn.benchmark = False

    def configure(self, options: Options) -> Options:
        """The options with the other folder; nothing is uploaded, and a replay logs to no service."""
        project = copy.copy(options.project)
        project.project_dir = project.logging_dir = self.folder
        project.remote = None
        return options._replace(project=project, log_with=("jsonl",) if self.note else options.log_with)

    def start(self, session: Session) -> None:
        """Remember the session, whose trackers are finished at the end."""
        self._sessions.append(session)

    def before_backward(self, loss: Tensor) -> None:
        """End before the step after the last one, so that the script has logged that one; note the loss of it."""
        step = STATUS_RECORD.run_step
        if self.last_step is not None and step >= self.last_step:
            for session in self._sessions:
                if session.tracking is not None:
                    session.tracking.finish()
            raise SystemExit(0)
        if self._is_noted(step):
            value = float(loss.detach())
            self._noted["losses"].append(repr(value))
            self._noted["finite"] &= bool(torch.isfinite(loss.detach()).all())
            self._write()

    def before_step(self, optimizer: Optimizer) -> None:
        """Note the gradients of the last step."""
        if self._is_noted(STATUS_RECORD.run_step):
            gradients = [weight.grad for weight in _weights(optimizer) if weight.grad is not None]
            self._noted["finite"] &= all(bool(torch.isfinite(_local(one)).all()) for one in gradients)
            self._noted["gradients"].append(_digest(gradients))
            self._write()

    def after_step(self, optimizer: Optimizer, stepped: Any) -> None:
        """Note the weights after the last step."""
        if self._is_noted(STATUS_RECORD.run_step):
            weights = list(_weights(optimizer))
            self._noted["finite"] &= all(bool(torch.isfinite(_local(one)).all()) for one in weights)
            self._noted["weights"].append(_digest(weights))
            self._write()

    def _is_noted(self, steps: int) -> bool:
        return self.note and self.last_step is not None and steps == self.last_step - 1

    def _write(self) -> None:
        rank = self._sessions[-1].process.rank if self._sessions else 0
        path = Path(self.folder, "replay", f"rank_{rank}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._noted), encoding="utf-8")


def _weights(optimizer: Optimizer) -> Iterable[Tensor]:
    return (weight for group in optimizer.param_groups for weight in group["params"])


def _local(tensor: Any) -> Tensor:
    """This process's part of a tensor that is distributed."""
    part: Tensor = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    return part


def _digest(tensors: Iterable[Tensor]) -> str:
    """Hash of the bits of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_local(tensor).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
