"""Creates the transport of a process: a local one, or one after a rendezvous with the other processes of the run.

The processes connect to a shared store. They check that each rank connected exactly once, and that the others know the
secret of the run (`accel_state.network.SECRET_VARIABLE`), because any program of the machine can listen at the port
before rank 0 does. Then torch.distributed creates a process group over that store. A process group that the script
itself initialised is used unchanged.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from accel_state.devices.base import DeviceFamily
from accel_state.errors import AccelError, CollectiveError, SettingError
from accel_state.network import SECRET_VARIABLE
from accel_state.settings.schema import import_object
from accel_state.topology import Topology
from accel_state.transport.base import Transport
from accel_state.transport.control import find_absent
from accel_state.transport.signature import Signer
from accel_state.untrusted import printable

__all__ = ("check_ranks", "init_transport", "process_group_backend", "topology_of_group")

_logger: Final = logging.getLogger(__name__)

_EXTRA_TIMEOUT: Final = timedelta(seconds=2)
"""Time in addition to the timeout in which torch may report the failure itself."""

_FAULT_READ_TIMEOUT: Final = timedelta(seconds=10)
"""How long the process that hosts the store waits for the others to read the reason of the failure."""

_NOTICE_AFTER: Final = timedelta(seconds=10)
"""How long a process waits for the others before it logs for whom it waits."""

_FIRST_RETRY_PAUSE_S: Final = 0.002
_MAX_RETRY_PAUSE_S: Final = 0.1
"""Seconds between two attempts to connect; they double up to the second value."""

_MAX_NAMED_RANKS: Final = 16
"""Maximum number of missing ranks that an error names."""

_rendezvous_counts: Counter[tuple[str, int]] = Counter()
"""Number of rendezvous of this process at each URL; a second one must not read the keys of the first one."""


def process_group_backend(family: DeviceFamily, requested: str | None) -> str:
    """Name of the torch.distributed backend for a device family; `requested` has precedence if it supports the family.

    "nccl" is the default of the interface, so for another family it means "select by device".

    Raises:
        NotOffered: no backend is requested and none is known.
    """
    if requested is None or (requested == "nccl" and family.spec.backend != "nccl"):
        return family.distributed_backend()
    return requested


def topology_of_group(count_devices: Callable[[], int]) -> Topology:
    """The topology of this process from the default group of torch.distributed, which the script has created.

    It is used if no launcher has set variables. It assumes that the ranks on each machine are consecutive.

    Args:
        count_devices: returns the number of devices of this machine. With several, this assumes as many processes on
            each machine; with one or none, that all processes are on this machine. Counting may initialise a device,
            so it is called after the group was created.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    devices = count_devices()
    local_world_size = world_size if devices <= 1 else min(devices, world_size)
    node, local = divmod(rank, local_world_size)
    return Topology(rank, world_size, local, local_world_size, node, scheme="process group")


def init_transport(
    topology: Topology,
    family: DeviceFamily,
    device: torch.device,
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
) -> tuple[Transport, str]:
    """Create the transport between this process and others; return it and the name of its torch.distributed backend.

    A process group that the script itself initialised is used unchanged, whatever its backend.

    Args:
        topology: the topology of this process.
        family: the family of its device.
        device: the device of its tensors.
        backend: backend of torch.distributed; by default that of the family.
        init_method: URL of the rendezvous; by default MASTER_ADDR and MASTER_PORT.
        timeout: timeout of the rendezvous and of each collective; by default that of the family.

    Raises:
        SettingError: there is no address for the rendezvous, or two processes have the same rank.
        NotOffered: no known backend supports tensors on the device.
        CollectiveError: the processes did not connect in time, or could not connect to each other.
    """
    limit = timeout or family.spec.timeout
    if dist.is_available() and dist.is_initialized():
        shared = dist.distributed_c10d._get_default_store()
        return _with_control(import_object(family.spec.transport)(device, limit, shared), limit), dist.get_backend()
    chosen = process_group_backend(family, backend)
    store = _init_store(topology, init_method, limit, family.exclusive_device(device, chosen) or "")
    try:
        return _connect(topology, family, device, chosen, store, limit), chosen
    except RuntimeError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise CollectiveError(
            f"Cannot connect process {topology.rank} of {topology.world_size} to the others after the rendezvous.",
            f"The backend {chosen!r} failed: {str(error).splitlines()[0]}.",
            "Check the output of the other processes and the network between the machines.",
        ) from error


def _connect(
    topology: Topology, family: DeviceFamily, device: torch.device, backend: str, store: Any, timeout: timedelta
) -> Transport:
    """Create a process group and the transport over it; the transport owns the group and ends it."""
    dist.init_process_group(
        backend=backend, store=store, rank=topology.rank, world_size=topology.world_size, timeout=timeout
    )
    transport: Transport = import_object(family.spec.transport)(device, timeout, store, owner=True)
    # A process that ended now would break connections that other processes are still opening.
    transport.barrier()
    return _with_control(transport, timeout)


def _with_control(transport: Transport, timeout: timedelta) -> Transport:
    """The transport, with an open connection for control messages.

    Their own deadlines are too short for a slow name server, which torch asks for each connection.
    """
    control = transport.control()
    if control is not None and transport.world_size > 1:
        control.open(timeout.total_seconds())
    return transport


# ---------------------------------------------------------------------- the store


def _init_store(topology: Topology, init_method: str | None, timeout: timedelta, device: str = "") -> Any:
    """The store that all processes share, with a separate prefix for each attempt of a restarted run.

    Raises:
        SettingError: there is no address, or several processes have the same rank.
        CollectiveError: the processes did not connect in time.
    """
    if init_method is None or init_method == "env://":
        _check_address(topology)
        url = f"tcp://{_url_host(str(topology.master_addr))}:{topology.master_port}"
    else:
        url = init_method
    try:
        notice = _waiting_notice(topology, url)
        store = _in_time(lambda: _open_store(url, topology, timeout), timeout, notice)
        store.set_timeout(timeout)
        again = _rendezvous_counts[url, topology.attempt]
        _rendezvous_counts[url, topology.attempt] += 1
        prefix = f"attempt{topology.attempt}" + (f".{again}" if again else "")
        named = dist.distributed_c10d.PrefixStore(prefix, store)
        limit = timeout + _FAULT_READ_TIMEOUT
        _in_time(lambda: check_ranks(named, topology, url, timeout, prefix, device), limit, notice)
    except AccelError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise _failed_rendezvous(topology, url, error) from error
    return named


def _url_host(address: str) -> str:
    if address == "localhost" and not _agent_hosts():
        # The only address at which rank 0 listens; a name may have others, where another program can listen.
        return "127.0.0.1"
    return f"[{address}]" if ":" in address else address


def _agent_hosts() -> bool:
    """Whether torchrun hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _check_address(topology: Topology) -> None:
    address = (("MASTER_ADDR", topology.master_addr), ("MASTER_PORT", topology.master_port))
    missing = [name for name, value in address if value is None]
    if missing:
        raise SettingError(
            f"Cannot connect rank {topology.rank} of {topology.world_size} ({topology.scheme}) to the other processes.",
            f"The rendezvous has no address: {' and '.join(missing)} not set.",
            "Set them, or start the script with `accel launch`, which sets them.",
        )


def _open_store(url: str, topology: Topology, timeout: timedelta) -> Any:
    from torch.distributed.rendezvous import rendezvous

    deadline = time.monotonic() + timeout.total_seconds()
    if topology.rank != 0:
        _wait_for_host(url, deadline)
    left = timedelta(seconds=max(deadline - time.monotonic(), 0.1))
    store = _host_on_loopback(url, topology, left)
    return next(rendezvous(url, topology.rank, topology.world_size, timeout=left))[0] if store is None else store


def _waiting_notice(topology: Topology, url: str) -> str:
    """For whom this process waits, where, and which variables say so."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    sources = ", ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))
    others = "rank 0" if topology.rank else f"the other {topology.world_size - 1} process(es)"
    return (
        f"Rank {topology.rank} of {topology.world_size} still waits for {others} at {url} "
        f"({topology.scheme}: {sources or 'no variables'}). If this run was not meant to have other processes, unset "
        "these variables."
    )


def _in_time(work: Callable[[], Any], timeout: timedelta, notice: str) -> Any:
    """The result of `work`; it runs in a thread that can be abandoned, because torch waits forever for a silent host.

    Args:
        work: waits for other processes.
        timeout: how long it may take.
        notice: logged when it takes long.

    Raises:
        TimeoutError: `work` did not end in time.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="accel_state.rendezvous", daemon=True)
    thread.start()
    limit = timeout + _EXTRA_TIMEOUT
    thread.join(min(limit, _NOTICE_AFTER).total_seconds())
    if thread.is_alive() and limit > _NOTICE_AFTER:
        _logger.warning("%s", notice)
        thread.join((limit - _NOTICE_AFTER).total_seconds())
    if not outcome:
        raise TimeoutError(f"the host there did not answer within {timeout.total_seconds():g} seconds")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _host_on_loopback(url: str, topology: Topology, timeout: timedelta) -> Any | None:
    """The store, hosted on the loopback interface; None if torch or another process hosts it.

    torch listens on every interface of the machine, even for a rendezvous at a loopback address.
    """
    address = urlsplit(url)
    if topology.rank != 0 or _agent_hosts() or os.name != "posix" or address.scheme != "tcp" or address.query:
        return None
    host = "127.0.0.1" if address.hostname == "localhost" else str(address.hostname)
    if not _is_loopback(host) or not address.port:
        return None
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # A launcher keeps the port bound without listening; both must set this option for that.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, address.port))
        listener.listen()
    except OSError:
        # torch reuses a store of this process that has not ended yet, and reports the error in all other cases.
        listener.close()
        return None
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        address.port,
        topology.world_size,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _wait_for_host(url: str, deadline: float) -> None:
    """Return as soon as the host of the store listens; torch would try only about twice a second.

    Raises:
        TimeoutError: no process listened before the deadline.
    """
    address = urlsplit(url)
    if address.scheme != "tcp" or address.hostname is None or address.port is None:
        return
    pause = _FIRST_RETRY_PAUSE_S
    while True:
        try:
            left = max(deadline - time.monotonic(), 0.1)
            socket.create_connection((address.hostname, address.port), timeout=left).close()
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise TimeoutError(f"no process listens there: {error}") from error
        else:
            return
        time.sleep(pause)
        pause = min(2 * pause, _MAX_RETRY_PAUSE_S)


def _failed_rendezvous(topology: Topology, url: str, error: Exception) -> CollectiveError:
    if "EADDRINUSE" in str(error):
        return CollectiveError(
            _cannot_meet(topology, url),
            "This process must listen at that address, and the port is in use by another program, or by a second "
            f"process that was started as rank {topology.rank}.",
            "Start every process with a different rank, or set another MASTER_PORT (`accel launch` finds a free one).",
        )
    return CollectiveError(
        _cannot_meet(topology, url),
        f"The rendezvous failed: {str(error).splitlines()[0]}.",
        "Check that the address is that of the first machine, that the port is free there, and that every process "
        "was started.",
    )


def _cannot_meet(topology: Topology, url: str) -> str:
    return f"Cannot connect process {topology.rank} of {topology.world_size} to the others at {url}."


# ---------------------------------------------------------------------- the check of ranks


def check_ranks(
    store: Any, topology: Topology, url: str, timeout: timedelta, scope: str = "", device: str = ""
) -> None:
    """Wait until every process of the run has connected, and check that no two have the same rank.

    Otherwise, two processes with the same rank would overwrite each other's connections, and all would wait. The keys
    are not removed, so that a second process of a rank is noticed even if it connects late. With a secret of the run,
    each process proves to rank 0 that it knows the secret, and rank 0 to each. Takes 4 requests per rank, 8 on rank 0.

    Args:
        store: store of the run, with a prefix for this attempt.
        topology: the topology of this process.
        url: address of the rendezvous, for errors.
        timeout: how long to wait for the others.
        scope: the prefix that `store` adds to keys.
        device: identity of the device of this process if no other process can use it; rank 0 warns about processes
            with the same one.

    Raises:
        CollectiveError: not every rank connected in time, or one does not know the secret of the run.
        SettingError: two processes have the same rank.
    """
    if topology.world_size == 1:
        return
    signer = Signer(scope)
    fault = _come(store, signer, topology, device)
    try:
        if topology.rank == 0:
            store.wait(["all came"], timeout)
            fault = _fault_of_others(store, signer, topology)
            store.set(_CHECKED_KEY, signer.sign(_CHECKED_KEY, 0, fault.encode()))
        else:
            store.wait([_CHECKED_KEY], timeout)
            said = _read_fault(store, signer, _CHECKED_KEY)
            fault = f"{_UNSIGNED_FAULT} 0" if said is None else said or fault
    except RuntimeError as error:
        raise CollectiveError(
            _cannot_meet(topology, url),
            _missing(store, topology, timeout),
            "Check the output of those processes, and that every process was started.",
        ) from error
    if fault:
        _wait_for_readers(store, topology)
        raise _error_of(fault, _cannot_meet(topology, url))


_TWICE_FAULT: Final = "twice"
_UNSIGNED_FAULT: Final = "unsigned"
"""Faults, each followed by ranks; the first is also the key of a fault that another process than rank 0 has found."""

_FAULT_TEXT: Final = re.compile(rb"(?:twice|unsigned) \d{1,9}(?:, \d{1,9})*|")

_CHECKED_KEY: Final = "checked"
"""Key of the fault that rank 0 has found, or of an empty text."""


def _come(store: Any, signer: Signer, topology: Topology, device: str) -> str:
    """Tell the others that this process has connected; return the fault if another process did so with its rank."""
    key, fault = f"came/{topology.rank}", ""
    own = signer.sign(key, topology.rank, f"{os.urandom(8).hex()} {device}".encode())
    first = bytes(store.compare_set(key, "", own))
    if first != own:
        if signer.read(key, first) is None:
            # A process without the secret of the run has written it.
            store.set(key, own)
        else:
            fault = f"{_TWICE_FAULT} {topology.rank}"
            store.set(_TWICE_FAULT, signer.sign(_TWICE_FAULT, topology.rank, fault.encode()))
    if store.add("came", 1) == topology.world_size:
        store.set("all came", "")
    return fault


def _fault_of_others(store: Any, signer: Signer, topology: Topology) -> str:
    """The first fault that rank 0 finds after all processes connected, as text; empty without one."""
    twice = _read_fault(store, signer, _TWICE_FAULT) if store.check([_TWICE_FAULT]) else None
    if twice:
        return twice
    keys = [f"came/{rank}" for rank in range(topology.world_size)]
    messages = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    payloads = [signer.read(key, bytes(text)) for key, text in zip(keys, messages, strict=True)]
    unsigned = [str(rank) for rank, message in enumerate(payloads) if message is None]
    if unsigned:
        return f"{_UNSIGNED_FAULT} {', '.join(unsigned[:_MAX_NAMED_RANKS])}"
    devices = [message.decode(errors="replace").partition(" ")[2] for message in payloads if message is not None]
    _warn_of_shared_devices([printable(device) for device in devices])
    return ""


def _read_fault(store: Any, signer: Signer, key: str) -> str | None:
    """The fault under a key, empty for none; None if no process of the run has written it.

    Without a secret any program may have written it. Errors quote it, so no text but that of a fault is accepted.
    """
    said = signer.read(key, bytes(store.get(key)))
    return None if said is None or _FAULT_TEXT.fullmatch(said) is None else said.decode()


def _warn_of_shared_devices(devices: Sequence[str]) -> None:
    """Warn in one line before the backend fails, which takes long and is hard to read.

    Args:
        devices: of each process, by rank; empty if others can use it too.
    """
    for device, count in Counter(filter(None, devices)).items():
        if count > 1:
            ranks = [str(rank) for rank, other in enumerate(devices) if other == device]
            _logger.warning(
                "Ranks %s use the same %s, which the backend of this run gives to one process only: the first "
                "collective will fail. Start one process for each device, or choose a backend for the CPU with "
                "InitProcessGroupKwargs(backend='gloo').",
                ", ".join(ranks[:_MAX_NAMED_RANKS]),
                device,
            )
            return


def _error_of(fault: str, cannot_meet: str) -> AccelError:
    kind, _, ranks = fault.partition(" ")
    if kind == _TWICE_FAULT:
        return SettingError(
            cannot_meet,
            f"Two processes were started as rank {ranks}.",
            "Start every process with a different rank, or start the script with `accel launch`.",
        )
    return CollectiveError(
        cannot_meet,
        f"What connected as rank {ranks} does not have the same secret of the run (${SECRET_VARIABLE}) as the others. "
        "It is a process with another value or none, or a program outside the run.",
        f"Set the same {SECRET_VARIABLE} for every process. If it is the same, another program uses the port: set "
        "another one.",
    )


def _missing(store: Any, topology: Topology, timeout: timedelta) -> str:
    try:
        missing = find_absent(store.check, [f"came/{rank}" for rank in range(topology.world_size)], _MAX_NAMED_RANKS)
    except RuntimeError as error:
        return f"The process that hosts the store is gone: {str(error).splitlines()[0]}."
    more = ", ..." if len(missing) == _MAX_NAMED_RANKS else ""
    return f"Ranks that did not connect within {timeout.total_seconds():g} s: {', '.join(map(str, missing))}{more}."


def _wait_for_readers(store: Any, topology: Topology) -> None:
    """Wait until every process has read from the store, because the store ends with this process."""
    with contextlib.suppress(RuntimeError):
        if store.add("left", 1) == topology.world_size:
            store.set("all left", "")
        if topology.rank == 0:
            store.wait(["all left"], _FAULT_READ_TIMEOUT)
