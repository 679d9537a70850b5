"""CPU time of collectives on nested data between two processes over gloo, and of walking nested data in one.

Each library is measured in interpreters of its own, ours and the original in turn, three times each. Of its rounds the
least counts, because what else a machine does only adds; shown are the mean of both ranks and the median of the turns.
"Raw" is plain torch.distributed on the same tensors, one collective for all small ones or one for each large one,
without any check.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

TURNS, ROUNDS = 3, 9
ROUND_SECONDS = 0.1


class Case(NamedTuple):
    """One line of the table.

    Args:
        name: what is done.
        limit: the largest ratio of ours to the original.
        make: makes the call from the functions of a library; torch alone has none.
        raw: makes the call that plain torch.distributed needs.
    """

    name: str
    limit: float
    make: Callable[[Any], Callable[[], object]]
    raw: Callable[[], Callable[[], object]] | None = None


def small() -> dict[str, Any]:
    """64 tensors of 512 bytes."""
    import torch

    return {f"leaf{index}": torch.rand(8, 16) for index in range(64)}


def large() -> list[Any]:
    """4 tensors of 1 MiB."""
    import torch

    return [torch.rand(512, 512) for _ in range(4)]


def ragged() -> dict[str, Any]:
    """64 tensors whose lengths depend on the rank."""
    import torch

    rank = int(os.environ["RANK"])
    return {f"leaf{index}": torch.rand(4 + (index + rank) % 5, 16) for index in range(64)}


def deep() -> dict[str, Any]:
    """200 tensors in lists, tuples and dicts."""
    import torch

    pairs = {str(index): (torch.zeros(2), torch.zeros(2)) for index in range(50)}
    return {"list": [torch.zeros(2) for _ in range(100)], "pairs": pairs}


def on(data: Callable[[], Any], name: str, *arguments: Any) -> Callable[[Any], Callable[[], object]]:
    """Makes a call of the function `name` of a library."""

    def make(library: Any) -> Callable[[], object]:
        value, function = data(), getattr(library, name)
        return lambda: function(value, *arguments)

    return make


def apply_identity(library: Any) -> Callable[[], object]:
    """Makes a call of `recursively_apply` that does nothing with each leaf."""
    value = deep()
    return lambda: library.recursively_apply(lambda tensor: tensor, value)


def raw_gather(data: Callable[[], Any], packed: bool) -> Callable[[], Callable[[], object]]:
    """Makes the gather of plain torch.distributed."""

    def make() -> Callable[[], object]:
        import torch
        import torch.distributed as dist

        gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        value = data()
        leaves = list(value.values()) if isinstance(value, dict) else value
        given = [torch.cat([leaf.reshape(-1) for leaf in leaves])] if packed else [leaf.view(-1) for leaf in leaves]
        return lambda: [gather_into(tensor.new_empty(2 * tensor.numel()), tensor) for tensor in given]

    return make


def raw_in_place(data: Callable[[], Any], packed: bool, operation: str) -> Callable[[], Callable[[], object]]:
    """Makes the all_reduce or broadcast of plain torch.distributed."""

    def make() -> Callable[[], object]:
        import torch
        import torch.distributed as dist

        value = data()
        leaves = list(value.values()) if isinstance(value, dict) else value
        given = [torch.cat([leaf.reshape(-1) for leaf in leaves])] if packed else leaves
        if operation == "broadcast":
            return lambda: [dist.broadcast(tensor, 0) for tensor in given]
        return lambda: [dist.all_reduce(tensor) for tensor in given]

    return make


def cases() -> list[Case]:
    """All lines of the table."""
    objects = "x" * 10_000
    return [
        Case("gather 64 x (8, 16)", 0.05, on(small, "gather"), raw_gather(small, True)),
        Case("reduce 64 x (8, 16)", 0.04, on(small, "reduce"), raw_in_place(small, True, "reduce")),
        Case("broadcast 64 x (8, 16)", 0.10, on(small, "broadcast"), raw_in_place(small, True, "broadcast")),
        Case("gather 4 x 1 MiB", 0.8, on(large, "gather"), raw_gather(large, False)),
        Case("reduce 4 x 1 MiB", 0.6, on(large, "reduce"), raw_in_place(large, False, "reduce")),
        Case("broadcast 4 x 1 MiB", 1.0, on(large, "broadcast"), raw_in_place(large, False, "broadcast")),
        Case("pad_across_processes 64 ragged", 0.04, on(ragged, "pad_across_processes")),
        Case("gather_object 10 KB", 0.65, on(lambda: [objects], "gather_object")),
        Case("broadcast_object_list 10 KB", 0.65, on(lambda: [objects], "broadcast_object_list")),
        Case("send_to_device 200 leaves", 0.4, on(deep, "send_to_device", "cpu")),
        Case("recursively_apply 200 leaves", 0.25, apply_identity),
    ]


def milliseconds(call: Callable[[], object]) -> float:
    """CPU time of one call, in the round that was disturbed least."""
    import torch.distributed as dist

    def round_of(calls: int) -> float:
        start = time.process_time()
        for _ in range(calls):
            call()
        return (time.process_time() - start) / calls

    round_of(3)
    # Both processes must make the same number of calls.
    agreed = [max(5, min(500, int(ROUND_SECONDS / round_of(5))))]
    dist.broadcast_object_list(agreed)
    return min(round_of(agreed[0]) for _ in range(ROUNDS)) * 1000


def child(kind: str) -> None:
    """Measure all cases with one library, in one of two processes, and print them from the first."""
    import torch.distributed as dist

    library = importlib.import_module("accelerate.utils.operations" if kind == "peer" else "accel_ops")
    importlib.import_module("accelerate" if kind == "peer" else "accel_state").PartialState(cpu=True)
    found: dict[str, Any] = {}
    for case in cases():
        call = case.raw() if kind == "raw" and case.raw else None if kind == "raw" else case.make(library)
        mine = milliseconds(call) if call else None
        both: list[Any] = [None, None]
        dist.all_gather_object(both, mine)
        found[case.name] = statistics.mean(both) if call else None
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def group(python: str, kind: str) -> dict[str, Any]:
    """What two processes measured."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    command = [python, *launch, __file__, "--child", kind]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment, timeout=300)
    found: dict[str, Any] = json.loads(next(line for line in shown.stdout.splitlines() if line.startswith("{")))
    return found


def main() -> None:
    """Measure and print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer")
    parser.add_argument("--child", choices=("ours", "peer", "raw"))
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    groups = {"ours": sys.executable, "peer": options.peer, "raw": sys.executable}
    turns = [{kind: group(python, kind) for kind, python in groups.items()} for _ in range(TURNS)]
    for case in cases():
        seen = {kind: [turn[kind][case.name] for turn in turns] for kind in groups}
        line = {kind: statistics.median(times) if None not in times else None for kind, times in seen.items()}
        print(
            json.dumps({"case": case.name, "unit": "CPU ms", **line, "figure": "ours/peer", "limit": case.limit}),
            flush=True,
        )


if __name__ == "__main__":
    main()
