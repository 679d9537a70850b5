"""A Ray cluster of several nodes on this machine, for tests, in a network namespace that has the loopback alone.

    python nodes.py FOLDER

Starts a head and a second node, writes the address into FOLDER/address, and then does what single lines on its input
say: `add` a node, `kill NUMBER` a node without a farewell, `behead` the cluster. Each is answered by `done`. It ends
with its input. Ray takes any other address of the machine for that of a node, which the namespace prevents.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

RESOURCES = {"num_cpus": 2, "object_store_memory": 80 << 20}


def main(folder: str) -> None:
    # Workers have a niceness of 15 otherwise, with which they hardly run on a busy machine.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    # Its sockets need a short path.
    temporary = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="r", dir="/tmp")
    Path(temporary, "ray").mkdir()
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    started(cluster, include_dashboard=False)
    nodes = [started(cluster)]
    Path(folder, "address").write_text(cluster.address, encoding="utf-8")
    print("done", flush=True)
    try:
        for line in sys.stdin:
            what, *arguments = line.split()
            if what == "add":
                nodes.append(started(cluster))
            elif what == "kill":
                cluster.remove_node(nodes.pop(int(arguments[0])), allow_graceful=False)
            elif what == "behead":
                cluster.head_node.kill_gcs_server()
            print("done", flush=True)
    finally:
        cluster.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)


def started(cluster: Any, **more: Any) -> Any:
    """A new node. Ray gives each 30 seconds, which is not enough on a busy machine."""
    for _ in range(4):
        try:
            return cluster.add_node(**RESOURCES, **more)
        except Exception as error:
            print(error, file=sys.stderr, flush=True)
    raise TimeoutError("No node of the Ray cluster started.")


if __name__ == "__main__":
    main(sys.argv[1])
