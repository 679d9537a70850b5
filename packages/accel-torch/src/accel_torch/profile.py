"""Profiles a block of a run: one trace file per process, and a table of the slowest operations on all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from accel_ops import gather_object
from accel_state.errors import SettingError
from accel_state.kwargs import KwargsHandler
from accel_state.protocol.call import barrier

if TYPE_CHECKING:
    from torch.profiler import profile

    from accel_state.current import Process

__all__ = ("ProfileKwargs", "ProfilerActivity", "profiled")

TRACE_NAME: Final = "profile_{suffix}.json"
SUMMARY_NAME: Final = "profile_summary.txt"

_SHOWN: Final = 25


class ProfilerActivity(str, Enum):
    """The activities that a profiler can record."""

    CPU = "cpu"
    XPU = "xpu"
    MTIA = "mtia"
    CUDA = "cuda"
    HPU = "hpu"

    def __str__(self) -> str:
        return self.value


@dataclass
class ProfileKwargs(KwargsHandler):
    """Settings of `accelerator.profile`: the arguments of `torch.profiler.profile`.

    Args:
        activities: activities to record, such as `["cpu", "cuda"]`. None records all that are available.
        schedule_option: the steps to record: the arguments of `torch.profiler.schedule` (`wait`, `warmup`, `active`,
            `repeat`, `skip_first`) as a dict. None records every step.
        on_trace_ready: called with the profiler after each recorded cycle of the schedule.
        record_shapes: record the shapes of inputs.
        profile_memory: record the memory that operations allocate.
        with_stack: record the source lines that call operations.
        with_flops: estimate floating-point operations.
        with_modules: record which module an operation belongs to.
        output_trace_dir: folder for a trace `profile_<process>.json` of each process, which Perfetto and
            chrome://tracing open, and the table `profile_summary.txt`. None writes no files.

    Raises:
        SettingError: an activity is unknown, or a schedule does not set `active`.

    Example:
        >>> handler = ProfileKwargs(activities=["cpu"], output_trace_dir="traces")
        >>> with accelerator.profile(handler) as profiler:
        ...     train(batch)
        >>> print(profiler.key_averages().table(sort_by="cpu_time_total", row_limit=10))
    """

    activities: list[Literal["cpu", "xpu", "mtia", "cuda", "hpu"]] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        names = [str(activity) for activity in ProfilerActivity]
        for activity in self.activities or ():
            if activity not in names:
                raise SettingError(
                    f"Cannot profile with activities={self.activities!r}.",
                    f"There is no activity {activity!r}.",
                    f"Choose from {', '.join(names)}.",
                )
        if self.schedule_option is not None and "active" not in self.schedule_option:
            raise SettingError(
                f"Cannot profile with schedule_option={self.schedule_option!r}.",
                "It does not set the number of recorded steps in a cycle.",
                "Add 'active', for example {'wait': 1, 'warmup': 1, 'active': 3}.",
            )

    def build(self) -> profile:
        """Create the profiler, without starting it."""
        import torch.profiler

        schedule = self.schedule_option
        return torch.profiler.profile(
            activities=None if self.activities is None else [_activity(name) for name in self.activities],
            schedule=None if schedule is None else torch.profiler.schedule(**{"wait": 0, "warmup": 0, **schedule}),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


def _activity(name: str) -> Any:
    """The torch constant of an activity.

    Raises:
        SettingError: the installed torch does not support it.
    """
    import torch.profiler

    activity = getattr(torch.profiler.ProfilerActivity, name.upper(), None)
    if activity is None:
        raise SettingError(
            f"Cannot profile with activities=[{name!r}].",
            "The profiler of the installed torch does not support it.",
            "Leave it out, or install a torch built for that device.",
        )
    return activity


@contextmanager
def profiled(process: Process, handler: ProfileKwargs) -> Iterator[profile]:
    """Context manager that profiles its block on every process.

    Traces are written if the block ends without an error on all processes.
    """
    folder = handler.output_trace_dir
    with handler.build() as profiler:
        yield profiler
    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(Path(folder) / TRACE_NAME.format(suffix=process.rank)))
    times = gather_object([_times(profiler)])
    if process.rank == 0:
        (Path(folder) / SUMMARY_NAME).write_text(summary(times), encoding="utf-8")
    barrier(process.transport, "profile")


def _times(profiler: profile) -> dict[str, tuple[int, float]]:
    """For each operation of this process, the number of calls and its own time in milliseconds."""
    return {
        event.key: (event.count, (event.self_cpu_time_total + event.self_device_time_total) / 1000)
        for event in profiler.key_averages()
    }


def summary(times: list[dict[str, tuple[int, float]]]) -> str:
    """A table of the slowest operations, with the mean and the longest time over processes.

    Args:
        times: for each process, a dict from operation to (calls, milliseconds).
    """
    rows = []
    for name in {name for own in times for name in own}:
        spent = [own.get(name, (0, 0.0))[1] for own in times]
        calls = max(own.get(name, (0, 0.0))[0] for own in times)
        rows.append((sum(spent) / len(spent), max(spent), spent.index(max(spent)), calls, name))
    rows.sort(key=lambda row: (-row[0], row[4]))
    lines = [f"{'mean ms':>12}{'longest ms':>12}{'on process':>12}{'calls':>8}  operation"]
    lines += [f"{mean:12.3f}{longest:12.3f}{rank:12d}{calls:8d}  {name}" for mean, longest, rank, calls, name in rows]
    return "\n".join(lines[: _SHOWN + 1]) + "\n"
