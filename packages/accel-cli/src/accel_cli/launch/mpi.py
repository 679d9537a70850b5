"""Starts processes on several machines through mpirun, and reads hostfiles with lines such as `node1 slots=4`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from accel_cli.config.resolved import ResolvedSettings
from accel_cli.launch.interface import LaunchPlan
from accel_cli.launch.program import ProgramLauncher
from accel_cli.launch.settings import MachineSettings
from accel_state.errors import Conflict, NotFound, SettingError
from accel_state.network import DEFAULT_PORT, SECRET_VARIABLE, new_secret
from accel_state.untrusted import read_limited

if TYPE_CHECKING:
    from accel_cli.launch.interface import LaunchRequest

__all__ = (
    "Host",
    "Mpi",
    "find_mpi",
    "placement",
    "read_hostfile",
)

_HOSTFILE_LINE: Final = re.compile(
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
    failure = f"Cannot read the hostfile {path} ({origin})."
    try:
        lines = read_limited(path, from_shell=True).decode().splitlines()
    except (OSError, ValueError) as error:
        raise SettingError(
            failure, f"It cannot be read: {error}.", "Give a text file with one machine per line."
        ) from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _HOSTFILE_LINE.fullmatch(text)
        if match is None:
            raise SettingError(failure, f"{path}:{number} is not a machine: {text!r}.", "Write it as: node1 slots=4")
        slots = match["slots"] or match["count"]
        if match["name"] in hosts:
            raise SettingError(
                failure, f"{path}:{number} lists {match['name']} a second time.", "Remove one of the two lines."
            )
        hosts[match["name"]] = Host(match["name"], None if slots is None else int(slots))
    if not hosts:
        raise SettingError(failure, f"{path} lists no machine.", "Write one machine per line, such as: node1 slots=4")
    return tuple(hosts.values())


_MPI_FAILURE: Final = "Cannot start processes with MPI."
_OPEN_MPI: Final = "Open MPI"
_VERSION_TIMEOUT_S: Final = 20.0


class Mpi(ProgramLauncher):
    """Starts the processes through mpirun, on the machines of a hostfile; see `Launcher`.

    Args:
        family: returns the family of the installed mpirun.
    """

    def __init__(self, family: Callable[[], str] | None = None) -> None:
        super().__init__()
        self._family = family or find_mpi

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Plan one mpirun command for all machines.

        Raises:
            SettingError: there is no hostfile, or it cannot be used.
            Conflict: it lists fewer machines than `num_machines`.
        """
        settings, hosts = request.settings, _hosts(request.settings)
        machines, family = settings.instance(MachineSettings), self._family()
        total = machines.num_processes
        processes = hosts[0].slots or 1 if total is None else max(total // len(hosts), 1)
        store = {
            "MASTER_ADDR": machines.main_process_ip or hosts[0].name,
            "MASTER_PORT": str(machines.main_process_port or DEFAULT_PORT),
        }
        place = placement(family, settings["mpirun_config.mpirun_hostfile"].value, processes)
        size = processes * len(hosts)
        plan = request.plan_of_program((), processes)
        variables = _exported({**plan.environment, **store}, family)
        argv = ("mpirun", *place, "-n", str(size), *variables, request.machine.python, *request.program)
        inherited = {SECRET_VARIABLE: new_secret(), **plan.inherited}
        return plan._replace(argv=argv, world_size=size, inherited=inherited)


def find_mpi() -> str:
    """The family of the installed mpirun: "Open MPI", or "Hydra" for MPICH, MVAPICH and Intel MPI.

    Raises:
        NotFound: `mpirun` is not on the path.
        SettingError: its version cannot be determined.
    """
    from shutil import which

    if which("mpirun") is None:
        remedy = "Install MPI, for example with: conda install -c conda-forge openmpi"
        raise NotFound(_MPI_FAILURE, "`mpirun` is not on the path.", remedy)
    try:
        answer = subprocess.check_output(
            ["mpirun", "--version"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SettingError(
            _MPI_FAILURE, f"`mpirun --version` failed: {error}.", "Repair the installation of MPI."
        ) from None
    return _OPEN_MPI if b"Open MPI" in answer or b"OpenRTE" in answer else "Hydra"


def _hosts(settings: ResolvedSettings) -> tuple[Host, ...]:
    """The machines of the run."""
    file, machines = settings["mpirun_config.mpirun_hostfile"], settings["num_machines"]
    if not file.value:
        raise SettingError(
            _MPI_FAILURE,
            "There is no hostfile that lists the machines.",
            "Set --mpirun_hostfile to the path of a file with one machine per line.",
        )
    hosts = read_hostfile(file.value, file.origin)
    if machines.is_set and machines.value > len(hosts):
        raise Conflict(
            f"Cannot combine {machines.text} and mpirun_hostfile ({file.origin}).",
            f"{file.value} lists {len(hosts)} machine(s).",
            "Correct one of them.",
        )
    return hosts[: machines.value] if machines.is_set else hosts


def placement(family: str, hostfile: str, processes: int) -> tuple[str, ...]:
    """Options of mpirun that put `processes` processes on each machine of a hostfile.

    Args:
        family: the result of `find_mpi`.
        hostfile: path of the file that lists the machines.
        processes: processes on each machine.
    """
    parts = _OPEN_MPI_OPTIONS if family == _OPEN_MPI else _HYDRA_OPTIONS
    return tuple(part.format(file=hostfile, each=processes) for part in parts)


_OPEN_MPI_OPTIONS: Final = ("--hostfile", "{file}", "--map-by", "ppr:{each}:node")
_HYDRA_OPTIONS: Final = ("-f", "{file}", "-ppn", "{each}")


def _exported(environment: Mapping[str, str], family: str) -> Iterator[str]:
    for name, value in sorted(environment.items()):
        yield from ("-x", f"{name}={value}") if family == _OPEN_MPI else ("-genv", name, value)
    if family == _OPEN_MPI:
        # Without a value, which every user of the machine could read; Hydra passes all variables on by itself.
        yield from ("-x", SECRET_VARIABLE)
