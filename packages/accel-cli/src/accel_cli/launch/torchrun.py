"""Starting processes through torch.distributed.run: several machines, restarts, or because it was asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Final

from accel_cli.config.effective import Effective
from accel_cli.launch.arguments import MachineSettings, TorchrunSettings

__all__ = ("AGENT", "PORT_OF_MACHINES", "torchrun_argv", "torchrun_environment")

AGENT: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "agent.py")
"""The module that calls torch.distributed.run in a process of its own."""

PORT_OF_MACHINES: Final = 29500
"""Port on which several machines meet when none was given: each has to know it without asking."""


def torchrun_argv(effective: Effective, processes: int, program: Sequence[str]) -> tuple[str, ...]:
    """Arguments of the interpreter that starts `processes` processes of a program on this machine."""
    machines = effective.instance(MachineSettings)
    options = effective.instance(TorchrunSettings)
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


def torchrun_environment(grace_period: float) -> dict[str, str]:
    """Variables of torch's agent: how many seconds processes may take to end after a signal."""
    return {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(grace_period))}


def _meeting(machines: MachineSettings, options: TorchrunSettings) -> Iterator[str]:
    """How the processes find each other."""
    conf = (f"--rdzv-conf={options.rdzv_conf}",) if options.rdzv_conf else ()
    static = options.rdzv_backend == "static"
    if static and machines.num_machines == 1 and not machines.main_process_port:
        yield from ("--standalone", *conf)
        return
    address = machines.main_process_ip or "127.0.0.1"
    port = machines.main_process_port or PORT_OF_MACHINES
    yield f"--node-rank={machines.machine_rank}"
    if static:
        yield from (f"--master-addr={address}", f"--master-port={port}", *conf)
        return
    yield from (f"--rdzv-backend={options.rdzv_backend}", f"--rdzv-endpoint={address}:{port}", *conf)
