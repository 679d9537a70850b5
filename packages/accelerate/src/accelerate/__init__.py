"""The package `accelerate` for existing scripts and libraries: names of the accel packages, by the table in `names`.

Type checkers read `__init__.pyi` instead. If it is missing, `python -m accelerate.names.stubs` writes it.
"""

from __future__ import annotations

from accelerate.address import serve
from accelerate.finder import install
from accelerate.installation import warn_of_clash
from accelerate.names import VERSION

__version__ = VERSION

__path__ = install(__path__)
serve(__name__)
warn_of_clash()
