"""Starts processes on several machines through mpirun, and reads hostfiles with lines such as `node1 slots=4`."""

from __future__ import annotations

import re
import subprocess as subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from accel_cli.config.resolved import ResolvedSettings
from accel_cli.launch.interface import LaunchPlan, LaunchRequest, one_process
from accel_cli.launch.local import Supervisor
from accel_cli.launch.settings import MachineSettings
from accel_state.errors import Conflict, NotFound, SettingError
from accel_state.network import DEFAULT_PORT, SECRET_VARIABLE, new_secret
from accel_state.untrusted import read_limited

__all__ = (
    "Host",
    "Mpi",
    "find_mpi",
    "mpi_argv",
    "mpi_hosts",
    "placement",
    "read_hostfile",
)

_LINE: Final = re.compile(
    r"(?P<name>[^\s:=]+)(?:\s+(?:slots|max_slots)=(?P<slots>[0-9]{1,9})|:(?P<count>[0-9]{1,9}))*\s*"
)


class Host(NamedTuple):
    """One machine; `slots` is its number of processes, or None if the file does not set it."""

    name: str
    slots: int | None = None


def read_hostfile(path: str, origin: str) -> tuple[Host, ...]:
    """Read the machines of a hostfile, in the order of its lines.

    Args:
        path: the file, in the form of Open MPI or of MPICH.
        origin: source of the path, for messages.

    Raises:
        SettingError: it cannot be read, lists no machine, lists one twice, or has a line in another form.
    """
    asked = f"Cannot read the hostfile {path} ({origin})."
    try:
        lines = read_limited(path, from_shell=True).decode().splitlines()
    except (OSError, ValueError) as error:
        raise SettingError(
            asked, f"It cannot be read: {error}.", "Give a text file with one machine per line."
        ) from None
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
            raise SettingError(
                asked, f"{path}:{number} lists {found['name']} a second time.", "Remove one of the two lines."
            )
        hosts[found["name"]] = Host(found["name"], None if slots is None else int(slots))
    if not hosts:
        raise SettingError(asked, f"{path} lists no machine.", "Write one machine per line, such as: node1 slots=4")
    return tuple(hosts.values())


_ASKED: Final = "Cannot start processes with MPI."
_OPEN: Final = "Open MPI"
_PATIENCE: Final = 20.0


class Mpi(Supervisor):
    """Starts the processes through mpirun, on the machines of a hostfile; see `Launcher`.

    Args:
        family: returns the family of the installed mpirun.
    """

    def __init__(self, family: Callable[[], str] | None = None) -> None:
        super().__init__()
        self._family = family or find_mpi

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Plan one mpirun command for all machines."""
        settings = request.settings
        hosts = mpi_hosts(settings)
        total = settings["num_processes"].value
        processes = hosts[0].slots or 1 if total is None else max(total // len(hosts), 1)
        program = (request.machine.python, *request.program)
        argv = mpi_argv(settings, processes, request.environment(processes), program, self._family())
        plan = one_process(request, argv, "mpi", processes)
        inherited = {SECRET_VARIABLE: new_secret(), **plan.inherited}
        return plan._replace(world_size=processes * len(hosts), inherited=inherited)


def find_mpi() -> str:
    """The family of the installed mpirun: "Open MPI", or "Hydra" for MPICH, MVAPICH and Intel MPI.

    Raises:
        NotFound: `mpirun` is not on the path.
        SettingError: its version cannot be determined.
    """
    from shutil import which

    if which("mpirun") is None:
        remedy = "Install MPI, for example with: conda install -c conda-forge openmpi"
        raise NotFound(_ASKED, "`mpirun` is not on the path.", remedy)
    try:
        answer = subprocess.check_output(
            ["mpirun", "--version"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_PATIENCE
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SettingError(_ASKED, f"`mpirun --version` failed: {error}.", "Repair the installation of MPI.") from None
    return _OPEN if b"Open MPI" in answer or b"OpenRTE" in answer else "Hydra"


def mpi_hosts(resolved: ResolvedSettings) -> tuple[Host, ...]:
    """The machines of the run.

    Raises:
        SettingError: no hostfile is given, or it cannot be used.
        Conflict: it lists fewer machines than `num_machines`.
    """
    file, machines = resolved["mpirun_config.mpirun_hostfile"], resolved["num_machines"]
    if not file.value:
        raise SettingError(
            _ASKED,
            "There is no hostfile that lists the machines.",
            "Set --mpirun_hostfile to the path of a file with one machine per line.",
        )
    hosts = read_hostfile(file.value, file.origin)
    if machines.given and machines.value > len(hosts):
        raise Conflict(
            f"Cannot combine num_machines={machines.value} ({machines.origin}) and mpirun_hostfile ({file.origin}).",
            f"{file.value} lists {len(hosts)} machine(s).",
            "Correct one of them.",
        )
    return hosts[: machines.value] if machines.given else hosts


def mpi_argv(
    resolved: ResolvedSettings,
    processes: int,
    environment: Mapping[str, str],
    program: Sequence[str],
    family: str,
) -> tuple[str, ...]:
    """Command line of mpirun for a program.

    Args:
        resolved: every setting of the launch.
        processes: processes on each machine.
        environment: variables of the processes on all machines.
        program: the command of each process.
        family: the result of `find_mpi`.
    """
    hosts = mpi_hosts(resolved)
    machines = resolved.instance(MachineSettings)
    store = {
        "MASTER_ADDR": machines.main_process_ip or hosts[0].name,
        "MASTER_PORT": str(machines.main_process_port or DEFAULT_PORT),
    }
    total = str(processes * len(hosts))
    place = placement(family, resolved["mpirun_config.mpirun_hostfile"].value, processes)
    variables = _exported({**environment, **store}, family)
    return ("mpirun", *place, "-n", total, *variables, *program)


def placement(family: str, hostfile: str, processes: int) -> tuple[str, ...]:
    """Options of mpirun that put `processes` processes on each machine of a hostfile.

    Args:
        family: the result of `find_mpi`.
        hostfile: path of the file that lists the machines.
        processes: processes on each machine.
    """
    parts = _OPEN_MPI if family == _OPEN else _HYDRA
    return tuple(part.format(file=hostfile, each=processes) for part in parts)


_OPEN_MPI: Final = ("--hostfile", "{file}", "--map-by", "ppr:{each}:node")
_HYDRA: Final = ("-f", "{file}", "-ppn", "{each}")


def _exported(environment: Mapping[str, str], family: str) -> Iterator[str]:
    for name, value in sorted(environment.items()):
        yield from ("-x", f"{name}={value}") if family == _OPEN else ("-genv", name, value)
    if family == _OPEN:
        # Without a value, which every user of the machine could read; Hydra passes all variables on by itself.
        yield from ("-x", SECRET_VARIABLE)
