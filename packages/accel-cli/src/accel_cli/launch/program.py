"""The base class of launchers whose plan is one program."""

from __future__ import annotations

from accel_cli.launch.interface import LaunchPlan

__all__ = ("ProgramLauncher",)


class ProgramLauncher:
    """The base class of launchers that start one program on this machine: a subclass plans it, in `plan`.

    The code that executes the plan is imported only by `run`, so that planning is fast.
    """

    def __init__(self) -> None:
        from accel_cli.launch.local import Supervisor

        self._supervisor = Supervisor()

    def run(self, plan: LaunchPlan) -> int:
        """Execute the plan, and return the exit code of the run."""
        return self._supervisor.run(plan)

    def stop(self) -> None:
        """End the run as SIGTERM does."""
        self._supervisor.stop()
