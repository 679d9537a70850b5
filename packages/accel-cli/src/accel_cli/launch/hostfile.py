"""Files that name machines, one a line with the number of processes it takes: `node1 slots=4`."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from accel_state.errors import SettingError
from accel_state.untrusted import read_limited

__all__ = ("Host", "read_hostfile")

_LINE: Final = re.compile(
    r"(?P<name>[^\s:=]+)(?:\s+(?:slots|max_slots)=(?P<slots>[0-9]{1,9})|:(?P<count>[0-9]{1,9}))*\s*"
)


class Host(NamedTuple):
    """One machine; `slots` is None where the file does not say how many processes it takes."""

    name: str
    slots: int | None = None


def read_hostfile(path: str, origin: str) -> tuple[Host, ...]:
    """The machines of a file, in its order.

    Args:
        path: the file, as DeepSpeed, Open MPI and MPICH read it.
        origin: who named the file.

    Raises:
        SettingError: it cannot be read, names nobody, names somebody twice, or has a line that is none of that form.
    """
    asked = f"Cannot read the hostfile {path} ({origin})."
    try:
        lines = read_limited(path, from_shell=True).decode().splitlines()
    except (OSError, ValueError) as error:
        raise SettingError(asked, f"It cannot be read: {error}.", "Give a text file with one machine a line.") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if found is None:
            raise SettingError(asked, f"{path}:{number} is not a machine: {text!r}.", "Write it as: node1 slots=4")
        slots = found["slots"] or found["count"]
        if found["name"] in hosts:
            raise SettingError(asked, f"{path}:{number} names {found['name']} again.", "Remove one of the lines.")
        hosts[found["name"]] = Host(found["name"], None if slots is None else int(slots))
    if not hosts:
        raise SettingError(asked, f"{path} names no machine.", "Write one a line, such as: node1 slots=4")
    return tuple(hosts.values())
