"""One task of Slurm that is one process of a run: sets the variables of its rank, and becomes the runner.

python slurm_task.py script train.py --lr 1e-3
"""

from __future__ import annotations

import os
import sys

__all__ = ("main",)


def main() -> None:
    """Set the variables that torchrun would set, and let the runner take this process over."""
    from accel_cli.launch.launcher import RUNNER
    from accel_state.topology import read_topology

    os.environ.update(read_topology().variables())
    os.execv(sys.executable, [sys.executable, RUNNER, *sys.argv[1:]])


if __name__ == "__main__":
    # The folder of this file came first; nothing may be imported from there by accident.
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    main()
