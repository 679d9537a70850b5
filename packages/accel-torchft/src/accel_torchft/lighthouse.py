"""The lighthouse of torchft in a separate process: `python -m accel_torchft.lighthouse 2.0 60.0 1`.

It prints its address and serves until it gets SIGTERM or the process that started it ends.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

__all__ = ("main",)


def main(heartbeat_timeout: float, join_timeout: float, min_replicas: int) -> None:
    """Run the lighthouse until the process ends.

    Args:
        heartbeat_timeout: seconds without a heartbeat after which a replica counts as dead.
        join_timeout: seconds that a quorum waits for a live replica that does not join.
        min_replicas: with fewer there is no quorum.
    """
    from torchft.coordination import LighthouseServer

    from accel_torchft.config import HOST_VARIABLE

    parent = os.getppid()
    host = os.environ.get(HOST_VARIABLE) or socket.gethostname()
    server = LighthouseServer(
        # Who joins by a lighthouse can send states, which are pickles: one for this machine alone hears no other.
        bind=f"{host if host.startswith('127.') else '0.0.0.0'}:0",
        min_replicas=min_replicas,
        join_timeout_ms=round(join_timeout * 1000),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=round(heartbeat_timeout * 1000),
    )
    port = server.address().rstrip("/").rpartition(":")[2]
    sys.stdout.write(f"http://{host}:{port}\n")
    sys.stdout.flush()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    # The launcher's own interrupt reaches the whole foreground group; replicas may need the lighthouse to end well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while not ended.wait(0.5) and os.getppid() == parent:
        pass
    server.shutdown()


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
