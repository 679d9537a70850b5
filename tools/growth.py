"""Measure how the cost of one rank grows with the number of ranks, and write docs/reports/growth.md with its plot.

    python tools/growth.py              worlds of 2, 64, 1,024 and 4,096 ranks, an interpreter each
    python tools/growth.py measure 64   one world, as JSON

One process acts as rank 1 of a world over torch's fake process group, which answers at once and sends nothing, so only
the work of the rank itself remains. Requests to the store of the run are counted with a thread for each rank. A test
asserts those counts; the times are for the plot, and are the minimum of several turns.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

from bench.results import machine

ROOT: Final = Path(__file__).resolve().parents[1]
FACTS: Final = ROOT / "docs" / "reports" / "growth.json"
PAGE: Final = ROOT / "docs" / "reports" / "growth.md"
PLOT: Final = ROOT / "docs" / "reports" / "growth.svg"
_GRAY: Final = "0.5"
"""A colour that is readable on light and dark pages."""

WORLDS: Final = (2, 64, 1024, 4096)

BLOCKS, WIDTH, ROWS, SAMPLES, BATCH = 40, 8, 4096, 1_000_000, 8
WATCHED: Final = 4.0
"""Seconds for which a hang monitor is watched."""

UNEXPLAINED: Final = "the reason is not known yet."

GROWS: Final = 1.2
"""A cost above this many times that of the smallest world grows, and needs a reason."""


class Quantity(NamedTuple):
    """What is measured.

    Args:
        unit: the unit of its values.
        reason: why it grows, if it does.
    """

    unit: str
    reason: str = ""


PIECES: Final = "torch splits each parameter into a shard for each rank; the next row shows the cost in plain torch."
PLAIN: Final = "the same in torch itself."

QUANTITIES: Final[Mapping[str, Quantity]] = {
    "start: state and Accelerator": Quantity(
        "CPU ms", "torch keeps a table of the ranks of each process group, and the start makes one group."
    ),
    "start: requests to the store": Quantity("requests"),
    "prepare, DDP": Quantity(
        "CPU ms",
        "DistributedDataParallel compares the shapes of all ranks: alone it takes 0.9 ms for 2 ranks and 4.2 for "
        "4,096.",
    ),
    "prepare, FSDP2": Quantity("CPU ms", PIECES),
    "the same by fully_shard alone": Quantity("CPU ms", PLAIN),
    "training step, FSDP2": Quantity("CPU ms", PIECES),
    "the same step by torch alone": Quantity("CPU ms", PLAIN),
    "scheduler step": Quantity(
        "CPU us",
        "a schedule advances by one step for each rank. Only a schedule that follows from its position jumps; the "
        "cosine of torch is a recurrence, and takes all of its steps.",
    ),
    "epoch of indices": Quantity("CPU ms"),
    "save: work of a rank without files": Quantity(
        "CPU ms",
        "its requests, in the next row, do not grow. The simulated ranks are threads of one interpreter, and the "
        "switches between thousands of them count here.",
    ),
    "save: requests to the store": Quantity("requests"),
    "save: requests of rank 0, for each rank": Quantity("requests"),
    "hang report, a second": Quantity("CPU ms"),
    "hang report: requests a second": Quantity("requests"),
}
"""Each line of the plot and row of the table, by its name."""


# ---------------------------------------------------------------- one world
def measure(world: int) -> dict[str, float]:
    """The costs of a rank in a world of that size, by the name of the quantity."""
    with tempfile.TemporaryDirectory() as folder:
        counted = agreement_of_save(world, Path(folder))
    return {
        **counted,
        "start: requests to the store": requests_of_start(world),
        **hang_report(world),
        "epoch of indices": 1e3 * least(epoch_of_indices(world)),
        **in_fake_world(world),
    }


def least(work: Callable[[], object], turns: int = 7, after: Callable[[], object] = gc.collect) -> float:
    """The minimum CPU time of some turns, in seconds: other work on the machine only adds time."""
    found = []
    for _ in range(turns + 1):
        begun = time.process_time()
        work()
        found.append(time.process_time() - begun)
        after()
    return min(found[1:])


def in_fake_world(world: int) -> dict[str, float]:
    """What rank 1 does by itself."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from accel_state.run_state import AcceleratorState
    from accel_torch import Accelerator, FullyShardedDataParallelPlugin

    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", rank=1, world_size=world, store=FakeStore())

    class Block(nn.Module):
        """A layer of which each rank of the largest world has a row."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, ROWS)

        def forward(self, inputs: Any) -> Any:
            return inputs + self.layer(inputs).view(-1, ROWS // WIDTH, WIDTH).mean(1)

    def parts() -> tuple[Any, Any, Any]:
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10**9)

    def started(**given: Any) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True, **given)

    def preparing(accelerator: Any) -> float:
        return least(lambda: accelerator.prepare(*parts()), after=accelerator.free_memory) - least(parts)

    def sharded_by_torch() -> tuple[Any, Any, Any]:
        model, optimizer, scheduler = parts()
        for block in model:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh), optimizer, scheduler

    starting = least(started)
    replicated = preparing(started())
    accelerator = started(
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
    )
    sharded = preparing(accelerator)
    model, optimizer, scheduler = accelerator.prepare(*parts())
    inputs = torch.ones(1, WIDTH)

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            optimizer.zero_grad()

    mesh = init_device_mesh("cpu", (world,))
    plain = sharded_by_torch()

    def plain_step() -> None:
        plain[0](inputs).sum().backward()
        plain[1].step()
        plain[1].zero_grad()

    return {
        "start: state and Accelerator": 1e3 * starting,
        "prepare, DDP": 1e3 * replicated,
        "prepare, FSDP2": 1e3 * sharded,
        "the same by fully_shard alone": 1e3 * (least(sharded_by_torch) - least(parts)),
        "training step, FSDP2": 1e3 * least(step),
        "the same step by torch alone": 1e3 * least(plain_step),
        "scheduler step": 1e6 * least(scheduler.step, 50),
    }


def epoch_of_indices(world: int) -> Callable[[], object]:
    """The batches of rank 1 in one epoch of a shuffled data set."""
    from torch.utils.data import BatchSampler, RandomSampler

    from accel_data import BatchSamplerShard

    shard = BatchSamplerShard(BatchSampler(RandomSampler(range(SAMPLES)), BATCH, False), world, 1)
    return lambda: sum(1 for _ in shard)


# ---------------------------------------------------------------- requests to the store of the run
def requests_of_start(world: int) -> float:
    """The largest number of requests of a rank in the rendezvous."""
    from counting_store import on_all_ranks, simulated_ranks

    from accel_state.transport.rendezvous import check_ranks

    ranks = simulated_ranks(world)
    patient = timedelta(minutes=10)
    raise_first(on_all_ranks(ranks, lambda rank: check_ranks(rank.transport.store(), rank.topology, "", patient)))
    return float(max(rank.count for rank in ranks))


def agreement_of_save(world: int, folder: Path) -> dict[str, float]:
    """What the ranks of a save, eight on each node, need to agree: requests, and CPU time of the quickest rank."""
    from counting_store import on_all_ranks, simulated_ranks

    from accel_ops import agreement
    from accel_plugins.checkpoint.commit import staging
    from accel_plugins.checkpoint.finalize import CheckpointFinalizer

    ranks = simulated_ranks(world, ranks_per_node=min(world, 8))
    seconds: list[float] = []

    def save(rank: Any) -> None:
        begun = time.thread_time()
        finalizer = CheckpointFinalizer(fsync=False)
        with staging(folder / "a", rank, fsync=False, deadline=600.0, finalizer=finalizer) as place:
            if rank.topology.is_local_main:
                (place / f"shard_{rank.rank}").write_text("weights", encoding="utf-8")
        if not rank.topology.is_local_main:
            seconds.append(time.thread_time() - begun)

    # Thousands of threads on a few cores are slow to answer.
    with mock.patch.multiple(agreement, _REPLY_TIMEOUT_S=600.0, _MAX_FAREWELL_S=600.0):
        raise_first(on_all_ranks(ranks, save))
    return {
        "save: work of a rank without files": 1e3 * min(seconds),
        "save: requests to the store": max(rank.count for rank in ranks[1:]),
        "save: requests of rank 0, for each rank": ranks[0].count / world,
    }


def raise_first(outcomes: Sequence[object]) -> None:
    """Raise what a rank raised."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def hang_report(world: int) -> dict[str, float]:
    """What the hang monitor of a rank takes while nothing hangs."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    from accel_state.transport.control import ControlStore
    from accel_state.watch.calls import CallLog
    from accel_state.watch.monitor import HangMonitor

    made: list[str] = []

    class Counting(ControlStore):
        def set(self, key: str, value: bytes, timeout: float) -> None:
            made.append(key)
            super().set(key, value, timeout)

        def get_many(self, keys: Sequence[str], timeout: float) -> dict[str, bytes]:
            made.extend(keys)
            return super().get_many(keys, timeout)

    monitor = HangMonitor(CallLog(), Counting(HashStore(), 1, secret="of the run"), 1, world)
    try:
        time.sleep(1.0)
        made.clear()
        begun, used = time.monotonic(), time.process_time()
        time.sleep(WATCHED)
        used, passed = time.process_time() - used, time.monotonic() - begun
        return {"hang report, a second": 1e3 * used / passed, "hang report: requests a second": len(made) / passed}
    finally:
        monitor.stop()


# ---------------------------------------------------------------- the page
HEAD: Final = """# Growth

`nox -s growth` writes this page. It shows the cost of one rank as the number of ranks grows, and the reason for each
cost that grows. Ranks are simulated: one process is rank 1 of a world over torch's fake process group, which answers
at once and sends nothing. Requests to the store of the run are counted with a thread for each rank, eight on each
node. The model has 40 layers of 4,096 rows; an epoch has a million shuffled samples. Times are the minimum of several
turns.

![Cost of one rank against the number of ranks, both axes logarithmic](growth.svg)
"""


def document(facts: dict[str, Any]) -> str:
    """The page with the measured values."""
    head = " | ".join(f"{world:,}" for world in facts["worlds"])
    lines = [HEAD, f"Measured on: {facts['machine']}.", "", f"| cost of one rank | unit | {head} | growth |"]
    lines.append("|---" * (len(facts["worlds"]) + 3) + "|")
    reasons = []
    for name, quantity in QUANTITIES.items():
        values = facts["values"][name]
        growth = values[-1] / values[0]
        cells = " | ".join(f"{value:.3g}" for value in values)
        lines.append(f"| {name} | {quantity.unit} | {cells} | {growth:.2g} |")
        if growth > GROWS:
            reasons.append(f"- **{name}**: {quantity.reason or UNEXPLAINED}")
    return "\n".join([*lines, "", "## Reasons", "", *(reasons or ["Nothing."]), ""])


def draw(facts: dict[str, Any], path: Path) -> None:
    """The plot: each cost as a multiple of that in the smallest world."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6.5), layout="constrained")
    axes = figure.subplots()
    for side in axes.spines.values():
        side.set_color(_GRAY)
    axes.tick_params(which="both", colors=_GRAY)
    for number, name in enumerate(QUANTITIES):
        values = facts["values"][name]
        style = ("-o", "--s", ":^")[number // 10 % 3]
        axes.loglog(facts["worlds"], [value / values[0] for value in values], style, markersize=4, label=name)
    axes.loglog(
        facts["worlds"],
        [world / facts["worlds"][0] for world in facts["worlds"]],
        ":",
        color=_GRAY,
        label="linear growth",
    )
    axes.set_xticks(facts["worlds"], [f"{world:,}" for world in facts["worlds"]])
    axes.set_ylim(0.2, 100)
    axes.set_xlabel("ranks", color=_GRAY)
    axes.set_ylabel(f"cost of one rank, {facts['worlds'][0]} ranks = 1", color=_GRAY)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="x-small", ncols=3, framealpha=0, labelcolor=_GRAY)
    # Without a date, and with the same ids each time, so that the file changes only when the plot does.
    figure.savefig(path, metadata={"Date": None}, transparent=True)


def in_interpreters(worlds: Iterable[int]) -> dict[str, list[float]]:
    """The costs by quantity, each world in an interpreter of its own."""
    found: dict[str, list[float]] = {}
    for world in worlds:
        command = [sys.executable, __file__, "measure", str(world)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"The world of {world} ranks could not be measured.\n{done.stderr[-4000:]}")
        for name, value in json.loads(done.stdout.splitlines()[-1]).items():
            found.setdefault(name, []).append(float(f"{value:.4g}"))
        print(f"{world:,} ranks", flush=True)
    return found


# The simulated ranks belong to tests.
sys.path.append(str(ROOT / "tests-integration"))


def main(given: Sequence[str]) -> int:
    """Measure one world, or all and write the page."""
    if given:
        print(json.dumps(measure(int(given[1]))))
        return 0
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "growth"
    facts = {"machine": machine(), "worlds": list(WORLDS), "values": in_interpreters(WORLDS)}
    FACTS.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(document(facts), encoding="utf-8")
    draw(facts, PLOT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
