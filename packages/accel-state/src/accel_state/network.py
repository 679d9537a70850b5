"""Ports and interfaces of this machine, and the secret of a run. Never loads torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from accel_state.errors import SettingError

__all__ = (
    "DEFAULT_PORT",
    "SECRET_VARIABLE",
    "get_free_port",
    "is_port_in_use",
    "loopback_variables",
    "new_secret",
)

DEFAULT_PORT: Final = 29500
"""Default port of the store of a run, the same as in torch.distributed."""

SECRET_VARIABLE: Final = "ACCEL_RUN_SECRET"
"""Variable with the secret of a run, which its processes use to sign the values in its store."""

_MAX_PORT: Final = 65535


_GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"


def new_secret() -> str:
    """A new secret, for a run on one machine; on several machines the user sets the same one on each."""
    return os.urandom(32).hex()


def loopback_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that bind gloo to the loopback interface, unless the user has chosen an interface."""
    import socket

    interfaces = {name for _index, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)
    return {} if loopback is None or environ.get(_GLOO_INTERFACE) else {_GLOO_INTERFACE: loopback}


def get_free_port() -> int:
    """A TCP port that is free now; another program may take it before the caller does."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_port_in_use(port: int | str | None = None) -> bool:
    """Whether a program of this machine listens on a TCP port, by default on `DEFAULT_PORT`.

    Raises:
        SettingError: there is no such port.
    """
    import socket

    try:
        number = DEFAULT_PORT if port is None else int(port)
    except ValueError:
        number = -1
    if not 0 <= number <= _MAX_PORT:
        raise SettingError(
            f"Cannot check the port {port!r}.",
            f"A port must be an integer from 0 to {_MAX_PORT}.",
            "Pass an integer from 0 to 65535; with 0 the system chooses.",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return number != 0 and probe.connect_ex(("localhost", number)) == 0
