"""Where the processes of a run meet: the store that they share, and the check that each of them is there once."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from accel_state.errors import AccelError, CollectiveError, SettingError
from accel_state.topology import Topology

__all__ = ("meet",)

_GRACE: Final = timedelta(seconds=2)
"""What torch is given beyond the timeout to report by itself."""

_LAST_WORDS: Final = timedelta(seconds=10)
"""How long the process that hosts the store stays for the others to read why all give up."""

_FIRST_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.1
"""Seconds between two looks whether somebody listens; they double up to this."""

_meetings: Counter[tuple[str, int]] = Counter()
"""How often this process met others at a place; a second meeting must not read what the first one left there."""


def meet(topology: Topology, init_method: str | None, timeout: timedelta) -> Any:
    """The store that all processes share, under a name of its own for each attempt of a restarted run.

    Args:
        topology: the place of this process.
        init_method: URL of the meeting place; by default MASTER_ADDR and MASTER_PORT.
        timeout: how long to wait for the others.

    Raises:
        SettingError: no place is known, or one rank was given to several processes.
        CollectiveError: the processes did not meet in time.
    """
    if init_method is None or init_method == "env://":
        _check_address(topology)
        host = f"[{topology.master_addr}]" if ":" in str(topology.master_addr) else topology.master_addr
        place = f"tcp://{host}:{topology.master_port}"
    else:
        place = init_method
    try:
        store = _in_time(lambda: _rendezvous(place, topology, timeout), timeout)
        store.set_timeout(timeout)
        again = _meetings[place, topology.attempt]
        _meetings[place, topology.attempt] += 1
        named = dist.distributed_c10d.PrefixStore(f"attempt{topology.attempt}" + (f".{again}" if again else ""), store)
        _in_time(lambda: _check_ranks(named, topology, place, timeout), timeout + _LAST_WORDS)
    except AccelError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise _not_met(topology, place, error) from error
    return named


def _rendezvous(place: str, topology: Topology, timeout: timedelta) -> Any:
    """The store at a place."""
    deadline = time.monotonic() + timeout.total_seconds()
    if topology.rank != 0:
        _wait_for_host(place, deadline)
    left = timedelta(seconds=max(deadline - time.monotonic(), 0.1))
    store = _on_loopback(place, topology, left)
    return next(rendezvous(place, topology.rank, topology.world_size, timeout=left))[0] if store is None else store


def _in_time(work: Callable[[], Any], timeout: timedelta) -> Any:
    """What `work` returns; it runs in a thread that can be left, since torch waits without end for a silent host.

    Raises:
        TimeoutError: nothing came of it.
    """
    outcome: list[Any] = []

    def go() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=go, name="accel-meeting", daemon=True)
    thread.start()
    thread.join((timeout + _GRACE).total_seconds())
    if not outcome:
        raise TimeoutError(f"what listens there did not answer within {timeout.total_seconds():g} seconds")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _on_loopback(place: str, topology: Topology, timeout: timedelta) -> Any | None:
    """The store, hosted on the loopback interface; None where torch hosts it or another process does.

    torch listens on every interface of the machine, also when all processes meet at a loopback address.
    """
    url = urlsplit(place)
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if topology.rank != 0 or agent_hosts or os.name != "posix" or url.scheme != "tcp" or url.query:
        return None
    address = "127.0.0.1" if url.hostname == "localhost" else str(url.hostname)
    if not _is_loopback(address) or not url.port:
        return None
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        # A launcher keeps the port bound without listening, for which both have to set this.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, url.port))
        listener.listen()
    except OSError:
        # A store of this process that was not ended yet is used again by torch; for others torch has the error.
        listener.close()
        return None
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        url.port,
        topology.world_size,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _wait_for_host(place: str, deadline: float) -> None:
    """Return when somebody listens at a place; torch would look only about twice a second.

    Raises:
        TimeoutError: nobody did before the deadline.
    """
    url = urlsplit(place)
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        return
    pause = _FIRST_PAUSE
    while True:
        try:
            socket.create_connection((url.hostname, url.port), timeout=max(deadline - time.monotonic(), 0.1)).close()
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise TimeoutError(f"nobody listened there: {error}") from error
        else:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _not_met(topology: Topology, place: str, error: Exception) -> CollectiveError:
    asked = f"Process {topology.rank} of {topology.world_size} wanted to meet the others at {place}."
    if "EADDRINUSE" in str(error):
        return CollectiveError(
            asked,
            "It is the one that has to listen there, and the port is in use: by another program, or by a second "
            f"process that was started as rank {topology.rank}.",
            "Give every process another rank, or choose another MASTER_PORT (`accel launch` finds a free one).",
        )
    return CollectiveError(
        asked,
        f"They did not meet: {str(error).splitlines()[0]}.",
        "Check that the address is that of the first machine, that the port is free there, and that every process "
        "was started.",
    )


def _check_address(topology: Topology) -> None:
    place = (("MASTER_ADDR", topology.master_addr), ("MASTER_PORT", topology.master_port))
    missing = [name for name, value in place if value is None]
    if missing:
        raise SettingError(
            f"This process was started as rank {topology.rank} of {topology.world_size} ({topology.scheme}).",
            f"{' and '.join(missing)} not set, so the processes do not know where to meet.",
            "Set them, or start the script with `accel launch`, which sets them.",
        )


def _check_ranks(store: Any, topology: Topology, place: str, timeout: timedelta) -> None:
    """Wait until as many processes came as belong to the run, and see that no two have the same rank.

    Two processes with one rank would otherwise overwrite each other's connections, and all would wait.
    """
    if topology.world_size == 1:
        return
    if store.add(f"came/{topology.rank}", 1) > 1:
        store.set("twice", str(topology.rank))
    if store.add("came", 1) == topology.world_size:
        store.set("all came", "")
    try:
        store.wait(["all came"], timeout)
    except RuntimeError as error:
        raise CollectiveError(
            f"Process {topology.rank} of {topology.world_size} wanted to meet the others at {place}.",
            _who_is_missing(store, topology, timeout),
            "Look at the output of those processes, and check that every process was started.",
        ) from error
    if store.check(["twice"]):
        twice = store.get("twice").decode()
        _leave_together(store, topology)
        raise SettingError(
            f"Process {topology.rank} of {topology.world_size} met the others at {place}.",
            f"Two processes were started as rank {twice}.",
            "Give every process another rank, or start the script with `accel launch`, which does.",
        )


def _who_is_missing(store: Any, topology: Topology, timeout: timedelta) -> str:
    try:
        missing = [str(rank) for rank in range(topology.world_size) if not store.check([f"came/{rank}"])]
    except RuntimeError as error:
        return f"The process that hosts the store is gone: {str(error).splitlines()[0]}."
    return f"After {timeout.total_seconds():g} seconds these had not come: {', '.join(missing)}."


def _leave_together(store: Any, topology: Topology) -> None:
    """Keep the store, which ends with its host, until every process has read from it."""
    with contextlib.suppress(RuntimeError):
        if store.add("left", 1) == topology.world_size:
            store.set("all left", "")
        if topology.rank == 0:
            store.wait(["all left"], _LAST_WORDS)
