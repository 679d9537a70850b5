"""The program of a Slurm task that is one process of a run: sets the variables of its rank, and starts the runner.

python slurm_task.py script train.py --lr 1e-3
"""

from __future__ import annotations

import os
import sys

__all__ = ("main",)


def main() -> None:
    """Set the variables that torchrun would set, and replace this process by the runner."""
    from accel_cli.launch.interface import RUNNER
    from accel_state.topology import read_topology

    os.environ.update(read_topology().variables())
    os.execv(sys.executable, [sys.executable, RUNNER, *sys.argv[1:]])


if __name__ == "__main__":
    # Python puts the folder of this file first; nothing must be imported from there by accident.
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    main()
