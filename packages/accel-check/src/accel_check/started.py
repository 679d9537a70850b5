"""Runs a command of `accel` as a script, so that tests can start it in a process that has imported torch."""

from __future__ import annotations

import sys
from pathlib import Path

__all__: tuple[str, ...] = ()

if __name__ == "__main__":
    # The folder of this file has modules with names of other packages' modules.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    from accel_cli.main import main

    sys.exit(main(sys.argv[1:]))
