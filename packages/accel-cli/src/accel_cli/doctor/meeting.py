"""Connects the machines of a run for `accel doctor --nodes`, through a store of torch, as the run does.

    python meeting.py < meeting.json

It reads one JSON object, the arguments of `meet`, and prints the members, or the error, as JSON on the last line.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import ExitStack
from typing import Any, Final

__all__ = ("CONNECTION_TIMEOUT_S", "meet")

CONNECTION_TIMEOUT_S: Final = 5.0
"""Seconds within which one machine must accept a connection of another, by default."""

_POLL_INTERVAL_S: Final = 0.1


def meet(
    host: str,
    port: int,
    machines: int,
    timeout: float,
    serves: bool,
    member: dict[str, Any],
    connection_timeout: float,
) -> list[Any]:
    """Connect to the other machines, and each to every other; return all members with whom each cannot reach.

    Args:
        host: address of the main machine.
        port: port of the run.
        machines: number of machines.
        timeout: seconds to wait for them.
        serves: whether this is the main machine.
        member: the rank and the facts about this machine.
        connection_timeout: seconds within which one machine must accept a connection of another.

    Raises:
        RuntimeError: the port is in use, or the main machine cannot be reached.
    """
    from datetime import timedelta

    import torch.distributed as dist

    from accel_cli.launch.addresses import address_towards

    deadline = time.monotonic() + timeout
    # Each machine may wait for a connection to each of the others.
    patience = connection_timeout * (2 * machines + 2)
    with ExitStack() as stack:
        listener = stack.enter_context(_listen())
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=serves, timeout=timedelta(seconds=timeout), wait_for_workers=False
        )
        own = {**member, "address": address_towards(host) or host, "port": listener.getsockname()[1]}
        # The store counts from 1; two machines may have the same rank, but not the same number.
        number = store.add("arrived", 1) - 1
        store.set(f"member {number}", json.dumps(own))
        if serves:
            _wait_for(store, "arrived", machines, deadline)
            store.set("count", str(store.add("arrived", 0)))
        left = timedelta(seconds=max(deadline - time.monotonic(), 0.0) + patience)
        store.wait(["count"], left)
        members = [json.loads(store.get(f"member {one}")) for one in range(int(store.get("count")))]
        others = [other for one, other in enumerate(members) if one != number]
        reasons = [(str(other["rank"]), _try(other, connection_timeout)) for other in others]
        own["unreachable"] = {rank: reason for rank, reason in reasons if reason}
        store.set(f"unreachable {number}", json.dumps(own["unreachable"]))
        for one, other in enumerate(members):
            try:
                store.wait([f"unreachable {one}"], timedelta(seconds=patience))
                other["unreachable"] = json.loads(store.get(f"unreachable {one}"))
            except RuntimeError:
                other["unreachable"] = {"0": "it disconnected"}
        done = store.add("done", 1)
        if serves and done < len(members):
            # The store ends with this process.
            _wait_for(store, "done", len(members), time.monotonic() + connection_timeout)
    return members


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _wait_for(store: Any, key: str, count: int, deadline: float) -> None:
    while store.add(key, 0) < count and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)


def _try(member: dict[str, Any], timeout: float) -> str:
    """The reason why a machine cannot be reached; empty if it can."""
    try:
        socket.create_connection((member["address"], member["port"]), timeout).close()
    except OSError as error:
        return str(error)
    return ""


def main() -> None:
    """Print the members or the error."""
    try:
        answer = {"error": "", "members": meet(**json.load(sys.stdin))}
    except RuntimeError as error:
        answer = {"error": str(error).splitlines()[0], "members": []}
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    # Python puts the folder of this file first; nothing must be imported from there by accident.
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    main()
