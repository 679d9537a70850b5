"""The process's environment: reading and temporarily changing variables, and binding to processors.

Importing this module never loads torch.

Settings of this project are read by `accel_state.settings.environ`; these are for scripts and other libraries.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from accel_state.settings.environ import from_environment
from accel_state.settings.run import ProcessSettings
from accel_state.settings.schema import BOOLEAN, INTEGER, Setting
from accel_state.topology import read_topology

T = TypeVar("T")

_logger: Final = logging.getLogger(__name__)

_PREFIX: Final = "ACCELERATE_"
_FORBIDDEN: Final = frozenset(";\n<>\t ")
_OLDEST_KERNEL: Final = (5, 5)
"""On older Linux kernels processes may hang without an error from torch."""


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Convert a word for yes or no, such as "true", "off" or "y", to 1 or 0.

    Args:
        value: the word, in any case.
        to_bool: return True or False instead of 1 or 0.

    Raises:
        SettingError: the word is not a word for yes or no.
    """
    meant = bool(Setting("str_to_bool", BOOLEAN).parse(value, "argument"))
    return meant if to_bool else int(meant)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Whether a variable is set to a word for yes; the default if it is not set.

    Raises:
        SettingError: its value is not a word for yes or no.
    """
    text = os.environ.get(key, "").strip()
    return bool(Setting(key, BOOLEAN).parse(text, f"${key}")) if text else default


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The value of a variable as text; the default if it is not set."""
    return os.environ.get(key, default)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first non-negative number among the variables' values, else the default.

    Raises:
        SettingError: a variable has a value that is not a number.
    """
    for key in env_keys:
        text = os.environ.get(key, "").strip()
        number = int(Setting(key, INTEGER).parse(text, f"${key}")) if text else -1
        if number >= 0:
            return number
    return default


@contextmanager
def _kept() -> Iterator[None]:
    """Restore all variables after the block."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def clear_environment() -> Iterator[None]:
    """Run a block without environment variables; all are restored afterwards."""
    with _kept():
        os.environ.clear()
        yield


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Run a block with some variables set; these are restored afterwards.

    Args:
        kwargs: values by the names of the variables, in any case.

    Example:
        >>> with patch_environment(omp_num_threads=2):
        ...     os.environ["OMP_NUM_THREADS"]
        '2'
    """
    names = [name.upper() for name in kwargs]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name.upper(): str(value) for name, value in kwargs.items()})
    try:
        yield
    finally:
        _restore(before)


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def purge_accelerate_environment(func_or_cls: T) -> T:
    """Decorator: after a call, restore the environment variables that start with `ACCELERATE_`.

    On a class it decorates the methods with names that start with `test_`, also those of subclasses.
    """
    decorated: Any = _purged_class(func_or_cls) if isinstance(func_or_cls, type) else _purged(func_or_cls)
    return decorated  # type: ignore[no-any-return]


def _purged(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
        try:
            return function(*args, **kwargs)
        finally:
            added = {name for name in os.environ if name.startswith(_PREFIX)} - before.keys()
            _restore({**before, **dict.fromkeys(added)})

    return call


def _purged_class(cls: Any) -> Any:
    inherited = cls.__init_subclass__

    def purge(of: Any) -> None:
        for name, value in list(vars(of).items()):
            if name.startswith("test_") and callable(value):
                setattr(of, name, _purged(value))

    def init_subclass(sub: Any, /, **kwargs: Any) -> None:
        inherited(**kwargs)
        purge(sub)

    cls.__init_subclass__ = classmethod(init_subclass)
    purge(cls)
    return cls


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Lines `NAME=value` for an environment file; variables that it cannot contain are skipped with a warning."""
    lines = []
    for name, value in current_env.items():
        if name and value and not _FORBIDDEN.intersection(name + value):
            lines.append(f"{name}={value}\n")
        else:
            _logger.warning(
                "The variable %s=%s is skipped: it is empty or contains whitespace or one of ; < >.", name, value
            )
    return lines


def are_libraries_initialized(*library_names: str) -> list[str]:
    """The libraries among the names that this process has imported."""
    return [name for name in library_names if name in sys.modules]


@dataclass
class CPUInformation:
    """Rank and world size of a process on CPUs, as set by its launcher.

    Args:
        rank: index among all processes.
        world_size: number of all processes.
        local_rank: index on this node.
        local_world_size: number of processes on this node.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Rank and world size of this process, from the launcher's environment variables."""
    place = read_topology()
    return CPUInformation(place.rank, place.world_size, place.local_rank, place.local_world_size)


def check_os_kernel() -> None:
    """Warn about a Linux kernel on which processes may hang."""
    if platform.system() != "Linux":
        return
    release = platform.release()
    version = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if version < _OLDEST_KERNEL:
        _logger.warning(
            "The Linux kernel %s is older than %s; processes may hang on it.",
            release,
            ".".join(map(str, _OLDEST_KERNEL)),
        )


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the processors nearest to its device, and replace an earlier binding.

    Args:
        local_process_index: index of the process on its node. It is used as the index of the device, unless
            ACCELERATE_TORCH_DEVICE contains one.
        verbose: whether to log the processors; by default only with ACCELERATE_DEBUG_MODE.

    Raises:
        NotOffered: the system cannot bind processes to processors.
    """
    import torch

    from accel_state.devices.select import wanted_family
    from accel_state.start import bind

    settings = from_environment(ProcessSettings)
    own_index = None if settings.device is None or settings.cpu else torch.device(settings.device).index
    index = local_process_index if own_index is None else own_index
    bind(wanted_family(settings), index, settings.debug if verbose is None else verbose)


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Call `override_numa_affinity` once for each index; a repeated call does not undo a later binding.

    Args:
        local_process_index: index of the process on its node. It is used as the index of the device, unless
            ACCELERATE_TORCH_DEVICE contains one.
        verbose: whether to log the processors.
    """
    override_numa_affinity(local_process_index, verbose)
