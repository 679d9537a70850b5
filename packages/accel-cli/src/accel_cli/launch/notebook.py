"""Launches a function without a script, from a notebook or a test.

For example:

    def train(lr):
        accelerator = Accelerator()
        ...

    notebook_launcher(train, args=(0.1,), num_processes=2)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from accel_cli.launch.failures import ending
from accel_cli.launch.run_script import PARENT_VARIABLE, follow_parent
from accel_state.errors import LaunchError, NotOffered, NotReady, SettingError
from accel_state.network import SECRET_VARIABLE, loopback_variables, new_secret
from accel_state.settings.environ import publish
from accel_state.settings.integers import as_int
from accel_state.settings.run import ProcessSettings, RunSettings
from accel_state.settings.schema import import_object, settings_of

__all__ = ("debug_launcher", "notebook_launcher")

_NOTEBOOK_FAILURE: Final = "Cannot launch the function."
_MIXED_PRECISION: Final = settings_of(RunSettings)["mixed_precision"]
_FORK_LAUNCHED: Final = settings_of(ProcessSettings)["fork_launched"]
_CPU: Final = settings_of(ProcessSettings)["cpu"]

# Hosts with notebooks on TPU machines, by a variable that each host sets.
_TPU_HOSTS: Final = ("TPU_NAME", "TPU_WORKER_ID")


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run a function on several processes from a notebook; create the Accelerator inside the function.

    Args:
        function: function that every process calls.
        args: positional arguments of the call.
        num_processes: number of processes on this machine; if None, one for each device.
        mixed_precision: as for `accel launch`.
        use_port: port for the rendezvous of the processes; on one machine, another port is used if it is taken.
        master_addr: address of the machine with rank 0.
        node_rank: rank of this machine, from 0.
        num_nodes: number of machines; the function is launched from a notebook on each machine.
        rdzv_backend: rendezvous backend, as for torch.distributed.run.
        rdzv_endpoint: rendezvous endpoint; by default address and port.
        rdzv_conf: further options of the rendezvous.
        rdzv_id: name of the run.
        max_restarts: number of restarts of all processes after a failure.
        monitor_interval: seconds between checks of the processes.
        log_line_prefix_template: prefix of each line of output, as for torch.distributed.run.

    Raises:
        SettingError: a number or the precision is not valid.
        NotReady: this notebook has created an Accelerator or used a GPU; its state would be copied.
        LaunchError: a process failed.

    Example:
        >>> notebook_launcher(print, args=("hello",), num_processes=1)  # doctest: +SKIP
    """
    from accel_cli.launch.devices import best_devices, count_devices
    from accel_cli.launch.torchrun import OWN_STORES

    environment = {str(_MIXED_PRECISION.variable): _MIXED_PRECISION.parse(mixed_precision, "argument")}
    starter = best_devices()["starter"] if any(name in os.environ for name in _TPU_HOSTS) else ""
    if starter:
        _check_untouched()
        with _variables(environment):
            # Forked processes can call the functions of a notebook.
            import_object(starter)(_called, args=(function, tuple(args)), start_method="fork")
        return
    processes = count_devices() if num_processes is None else num_processes
    processes, node_rank, num_nodes = _numbers(processes, node_rank, num_nodes)
    if num_nodes > 1 or max_restarts > 0:
        _check_untouched()
        secret = {SECRET_VARIABLE: new_secret()} if num_nodes == 1 else {}
        own_stores = {OWN_STORES: os.environ.get(OWN_STORES, "1")} if rdzv_backend != "static" else {}
        with _variables({**environment, **secret, **own_stores, str(_FORK_LAUNCHED.variable): "true"}):
            options = {
                "min_nodes": num_nodes,
                "max_nodes": num_nodes,
                "nproc_per_node": processes,
                "run_id": rdzv_id,
                "rdzv_backend": rdzv_backend,
                "rdzv_endpoint": rdzv_endpoint or f"{master_addr}:{use_port}",
                "rdzv_configs": {**(rdzv_conf or {}), **({"rank": node_rank} if rdzv_backend == "static" else {})},
                "max_restarts": max_restarts,
                "monitor_interval": monitor_interval,
                "start_method": "fork",
                "log_line_prefix_template": log_line_prefix_template,
            }
            _elastic(function, args, options)
    elif processes == 1:
        with _variables(environment):
            function(*args)
    else:
        _check_untouched()
        with _free_port(use_port) as port:
            _fork(function, args, list(_places(processes, master_addr, port, environment)))


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run a function on several processes on the CPU of this machine, as a test does.

    Args:
        function: what each process calls.
        args: positional arguments of the call.
        num_processes: number of processes, at least 1.

    Raises:
        SettingError: the number is not valid.
        NotReady: this process has created an Accelerator; its state would be copied.
        LaunchError: a process failed.

    Example:
        >>> debug_launcher(print, args=("hello",), num_processes=2)  # doctest: +SKIP
    """
    num_processes, _, _ = _numbers(num_processes, 0, 1)
    _check_untouched()
    environment = {str(_CPU.variable): "true"}
    if num_processes == 1:
        # One process without a process group, like a script that is started directly.
        _fork(function, args, [{**environment, str(_FORK_LAUNCHED.variable): "true"}])
        return
    with _free_port("0") as port:
        _fork(function, args, list(_places(num_processes, "127.0.0.1", port, environment)))


def _fork(function: Callable[..., Any], args: Sequence[Any], environments: Sequence[Mapping[str, str]]) -> None:
    """Call a function in one forked process for each environment, and wait until all calls have returned.

    A forked process can call a function that no other process can import, such as one of a notebook.
    """
    from torch.multiprocessing.spawn import ProcessException, ProcessRaisedException, start_processes

    if not hasattr(os, "fork"):
        raise NotOffered(
            "Cannot run the function in several processes.",
            "This system cannot fork a process.",
            "Write the function into a script, and start it with: accel launch script.py",
        )
    sys.stdout.flush()
    sys.stderr.flush()
    own = [{**environment, PARENT_VARIABLE: str(os.getpid())} for environment in environments]
    start: Any = start_processes
    started = start(_in_fork, (function, tuple(args), own), len(own), join=False, start_method="fork")
    try:
        while not started.join():
            continue
    except ProcessException as error:
        raised = isinstance(error, ProcessRaisedException)
        how = f"raised: {error.msg.strip()}\n" if raised else f"{ending(getattr(error, 'exit_code', None))}."
        raise LaunchError(
            f"The function failed in one of {len(own)} processes.",
            f"Process {error.error_index} {how}",
            "The other processes were ended. Correct the function, and launch it again.",
        ) from None
    finally:
        for process in started.processes:
            if process.is_alive():
                process.kill()


def _in_fork(index: int, function: Callable[..., Any], args: Sequence[Any], own: Sequence[dict[str, str]]) -> None:
    import torch

    publish(own[index])
    follow_parent()
    # A fork does not copy threads, and a parallel region would wait for them forever.
    torch.set_num_threads(1)
    function(*args)


def _places(processes: int, address: str, port: int, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Variables of each process."""
    size, secret = str(processes), new_secret()
    inside = loopback_variables({**os.environ, **environment})
    for rank in map(str, range(processes)):
        yield {
            **environment,
            **inside,
            SECRET_VARIABLE: secret,
            str(_FORK_LAUNCHED.variable): "true",
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }


def _numbers(processes: Any, node_rank: Any, num_nodes: Any) -> tuple[int, int, int]:
    """The three numbers as integers of Python."""
    processes = _at_least(1, "num_processes", processes)
    num_nodes = _at_least(1, "num_nodes", num_nodes)
    node_rank = _at_least(0, "node_rank", node_rank)
    if node_rank >= num_nodes:
        raise SettingError(
            _NOTEBOOK_FAILURE,
            f"node_rank={node_rank} is not less than num_nodes={num_nodes}.",
            "Number the nodes from 0.",
        )
    return processes, node_rank, num_nodes


def _at_least(least: int, name: str, value: Any) -> int:
    number = as_int(value)
    if number is None or number < least:
        raise SettingError(
            _NOTEBOOK_FAILURE, f"{name}={value!r} is not an integer of at least {least}.", "Correct the number."
        )
    return number


def _check_untouched() -> None:
    """Check that this process has neither a state nor an open device, because a fork would copy them."""
    current = sys.modules.get("accel_state.current")
    if current is not None and current.process_or_none() is not None:
        raise NotReady(
            _NOTEBOOK_FAILURE,
            "This process already has an Accelerator or a state, which every forked process would inherit.",
            "Restart the notebook, and create the Accelerator only inside the function.",
        )
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        raise NotReady(
            _NOTEBOOK_FAILURE,
            "This process has already used a GPU, so that processes forked from it cannot use one.",
            "Restart the notebook, and use the GPU only inside the function.",
        )


@contextmanager
def _free_port(wanted: str) -> Iterator[int]:
    """The given port, or another one if it is in use."""
    from accel_cli.launch.port import Port

    if not str(wanted).isdecimal():
        raise SettingError(
            _NOTEBOOK_FAILURE,
            f"use_port={wanted!r} is not a port number.",
            "Give a port number, or 0 to select a free port.",
        )
    try:
        port = Port(int(wanted) or None, "use_port")
    except SettingError:
        port = Port()
    with port:
        yield port.number


@contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    publish(environment)
    try:
        yield
    finally:
        publish(
            {name: value for name, value in before.items() if value is not None},
            remove=[name for name, value in before.items() if value is None],
        )


def _elastic(function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Start the processes through torch, on several machines or with restarts."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from accel_cli.launch.addresses import Seat, seat_at

    seat = Seat(None, None)
    if options["rdzv_backend"] == "c10d":
        host, _, port = options["rdzv_endpoint"].rpartition(":")
        seat = seat_at(host.strip("[]"), int(port)) if port.isdecimal() else seat
        serves = {} if seat.serves is None else {"is_host": seat.serves}
        options = {**options, "local_addr": seat.address, "rdzv_configs": {**serves, **options["rdzv_configs"]}}
    try:
        elastic_launch(LaunchConfig(**options), record(function))(*args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        remedy = "Correct the function, and launch it again."
        raise LaunchError(_NOTEBOOK_FAILURE, f"Process {rank} failed: {failure.message}", remedy) from error
    finally:
        if seat.port is not None:
            seat.port.close()


def _called(index: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    del index
    function(*arguments)
