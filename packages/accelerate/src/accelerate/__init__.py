"""What scripts and libraries find at the old address `accelerate`: names of our packages, by the table in `names`.

Type checkers read `__init__.pyi` instead. Where it is missing, `python -m accelerate.names.stubs` writes it.
"""

from __future__ import annotations

from accelerate.address import serve
from accelerate.finder import install
from accelerate.names import VERSION

__version__ = VERSION

__path__ = install(__path__)
serve(__name__)
