"""The variables of an outer launch, which a launch inside it must not inherit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from accel_state.network import SECRET_VARIABLE
from accel_state.settings.environ import ORIGINS

__all__ = ("PLACE_VARIABLES", "WRITTEN", "without_outer", "written")

WRITTEN: Final = "ACCEL_LAUNCH_VARIABLES"
"""Variable that lists the variables which a launch has set."""

PLACE_VARIABLES: Final = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_ERROR_FILE",
)
"""Variables with which a launch describes each process's place, except for the address of the store."""

_INHERITED_VARIABLE: Final = "PYTHONPATH"
"""A variable to which a launch only adds, so that a launch inside it inherits it."""

_STORE_VARIABLES: Final = ("MASTER_ADDR", "MASTER_PORT", SECRET_VARIABLE)
_TORCHRUN_TRACE: Final = "TORCHELASTIC_RUN_ID"
_TORCHRUN_PREFIXES: Final = ("TORCHELASTIC_", "ROLE_", "GROUP_")


def written(environment: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Value of `WRITTEN`: the variables that a launch adds or changes, without those that it passes on unchanged."""
    changed = [
        name for name, value in environment.items() if environ.get(name) != value and name != _INHERITED_VARIABLE
    ]
    return ",".join(sorted({*changed, *PLACE_VARIABLES, *_STORE_VARIABLES}))


def without_outer(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of an outer launch by this launcher or by torch.distributed.run."""
    dropped = {WRITTEN, ORIGINS, *environ.get(WRITTEN, "").split(",")}
    if _TORCHRUN_TRACE in environ:
        dropped.update(PLACE_VARIABLES, _STORE_VARIABLES, _with_prefix(environ))
    return {name: value for name, value in environ.items() if name not in dropped}


def _with_prefix(environ: Iterable[str]) -> Iterable[str]:
    return (name for name in environ if name.startswith(_TORCHRUN_PREFIXES))
