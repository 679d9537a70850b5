"""Starts processes through torch.distributed.run: for several machines, for restarts, or on request."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from accel_cli.config.resolved import ResolvedSettings
from accel_cli.launch.interface import LaunchPlan
from accel_cli.launch.program import ProgramLauncher
from accel_cli.launch.settings import MachineSettings, SupervisionSettings, TorchrunSettings
from accel_state.network import DEFAULT_PORT, loopback_variables

if TYPE_CHECKING:
    from accel_cli.launch.interface import LaunchRequest

__all__ = ("AGENT", "OWN_STORES", "Torchrun", "torchrun_argv", "torchrun_environment")

AGENT: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "agent.py")
"""The program that calls torch.distributed.run in a separate process."""

OWN_STORES: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Variable of torch's agent: whether the processes of each attempt serve a new store."""


class Torchrun(ProgramLauncher):
    """Starts the processes through torch.distributed.run; see `Launcher`."""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Plan one agent of torch, which starts the processes of this machine."""
        settings, environ = request.settings, request.machine.environ
        local, machines = request.local_processes(), settings["num_machines"].value
        argv = (request.machine.python, *torchrun_argv(settings, local, request.program))
        agent = {**torchrun_environment(settings, environ), **settings.variables(SupervisionSettings)}
        inside = loopback_variables(environ) if machines == 1 else {}
        plan = request.plan_of_program(argv, local, **agent, **inside)
        # A machine's agent reads its rank from an outer launch; each process gets its own rank from the agent.
        return plan._replace(processes=local, world_size=local * machines, replaces=True, removed=())


def torchrun_argv(resolved: ResolvedSettings, processes: int, program: Sequence[str]) -> tuple[str, ...]:
    """Arguments of the interpreter, to start `processes` processes of a program on this machine."""
    machines = resolved.instance(MachineSettings)
    options = resolved.instance(TorchrunSettings)
    return (
        AGENT,
        f"--nnodes={machines.num_machines}",
        f"--nproc-per-node={processes}",
        *_meeting(machines, options),
        f"--max-restarts={options.max_restarts}",
        f"--monitor-interval={options.monitor_interval}",
        f"--role={options.role}",
        f"--tee={options.tee}",
        *((f"--log-dir={options.log_dir}",) if options.log_dir else ()),
        *program,
    )


def torchrun_environment(resolved: ResolvedSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of torch's agent: the grace period after a signal, and which process serves the store.

    An agent remembers the address of the store that it shares with its processes, so that a replacement machine cannot
    join. If the number of machines may change, the processes serve a separate store instead.

    Args:
        resolved: every setting of the launch.
        environ: variables of the launcher.
    """
    variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(resolved["grace_period"].value))}
    if resolved["rdzv_backend"].value != "static" and resolved["num_machines"].value > 1:
        variables[OWN_STORES] = environ.get(OWN_STORES, "1")
    return variables


def _meeting(machines: MachineSettings, options: TorchrunSettings) -> Iterator[str]:
    """Arguments for the rendezvous."""
    conf = (f"--rdzv-conf={options.rdzv_conf}",) if options.rdzv_conf else ()
    static = options.rdzv_backend == "static"
    if static and machines.num_machines == 1 and not machines.main_process_port:
        yield from ("--standalone", *conf)
        return
    address = machines.main_process_ip or "127.0.0.1"
    port = machines.main_process_port or DEFAULT_PORT
    if static:
        yield from (f"--node-rank={machines.machine_rank}", f"--master-addr={address}", f"--master-port={port}", *conf)
        return
    yield from (f"--rdzv-backend={options.rdzv_backend}", f"--rdzv-endpoint={address}:{port}", *conf)
