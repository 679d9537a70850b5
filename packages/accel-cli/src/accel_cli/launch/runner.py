"""The program with which every process of a run starts: it runs a script, and records its error for the launcher.

    python runner.py script train.py --lr 1e-3
    python runner.py module package.train --lr 1e-3
    python runner.py program ./train --lr 1e-3

The interpreter compiles a program anew at each start. So the program is short, and `run_script` does the work, whose
bytecode is kept. It is loaded by its path: the script's process imports none of our packages by itself.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # That of `importlib.machinery`, which loads further modules.
    from _frozen_importlib_external import SourceFileLoader

    # In a module of its own: the dictionary of this one becomes the script's.
    _runner = type(sys)("accel_cli.launch.run_script")
    _runner.__file__ = f"{__file__.removesuffix('runner.py')}run_script.py"
    SourceFileLoader(_runner.__name__, _runner.__file__).exec_module(_runner)
    _runner.main()
