"""The first program in every process of a run: it runs a script, and records its error for the launcher.

    python runner.py script train.py --lr 1e-3
    python runner.py module package.train --lr 1e-3
    python runner.py program ./train --lr 1e-3

The interpreter compiles a program again at each start. So this program is short, and calls `run_script`, which has
cached bytecode. That module is loaded by its path, so that the script's process does not import any accel package.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # This is the class of `importlib.machinery`, which would import further modules.
    from _frozen_importlib_external import SourceFileLoader

    # In a separate module, because the dictionary of this one becomes the script's.
    _runner = type(sys)("accel_cli.launch.run_script")
    _runner.__file__ = f"{__file__.removesuffix('runner.py')}run_script.py"
    SourceFileLoader(_runner.__name__, _runner.__file__).exec_module(_runner)
    _runner.main()
