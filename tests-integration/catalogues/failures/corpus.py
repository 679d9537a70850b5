"""Forty scripts that fail under `accel launch` with two processes, each with what has to be done about it.

    failure = CATALOGUE["killed_once_at_the_start"]
    Path("train.py").write_text(failure.script)
    accel launch --cpu --num_processes 2 --restart_policy auto --max_restarts 20 *failure.options train.py FOLDER

Every script trains twelve steps on a prepared loader of samples 0 to 31, in order, two at a time for each process: in
step `n` of the first pass, rank `r` has the samples 4 n + 2 r and 4 n + 2 r + 1. It saves after every fourth step and
resumes from the newest checkpoint. Each process leaves an empty file in FOLDER/starts_<rank> for every start, by which
a script knows how often it was started before (`START`), and FOLDER/done_<rank> when it has finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

__all__ = ("CATALOGUE", "Action", "Failure")

_SCRIPT: Final = '''\
"""{why}"""

import errno
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch

FOLDER = Path(sys.argv[1])
RANK = int(os.environ.get("RANK", "0"))
STARTS = FOLDER / f"starts_{{RANK}}"
STARTS.mkdir(parents=True, exist_ok=True)
START = len(list(STARTS.iterdir()))
(STARTS / str(START)).touch()

{before}

from accel_torch import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs, ProjectConfiguration


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
{item}
        return index, torch.full((4,), index / 32)


class Count:
    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {{"steps": self.steps}}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def main():
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(str(FOLDER / "run"), automatic_checkpoint_naming=True),
        dataloader_config=DataLoaderConfiguration(restore_position=True),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds={timeout}))],
    )
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(Samples(), {loader})
    count = Count()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(count)
{resume}
    while count.steps < 12:
        for ids, batch in loader:
            step, ids = count.steps, ids.tolist()
{in_step}
            loss = model(batch).square().mean()
{after_loss}
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            count.steps += 1
            if count.steps % 4 == 0:
                accelerator.save_state()
            if count.steps >= 12:
                break
    accelerator.end_training()
    (FOLDER / f"done_{{RANK}}").touch()


if __name__ == "__main__":
    main()
'''

_IN_ORDER: Final = "batch_size=2"


class Action(str, Enum):
    """What has to become of a run."""

    FINISH = "finish"
    """Nothing failed: the run ends with exit code 0 and without a restart."""

    RESTART = "restart"
    """The run is started again, and ends with exit code 0."""

    STOP = "stop"
    """The run ends with an exit code that is not 0, before it has used up its restarts.

    The message may name the samples that were at hand: a failure in the same step of two starts has the same ones.
    """

    STOP_WITH_BUDGET = "stop-with-budget"
    """The run ends with an exit code that is not 0, when its restarts are used up."""

    STOP_AND_NAME_SAMPLES = "stop-and-name-samples"
    """As STOP, and the message names the samples."""

    STOP_WITH_MEMORY = "stop-with-memory"
    """As STOP, without any restart, and the message has the numbers of memory that are known."""


@dataclass(frozen=True)
class Failure:
    """One failure and what has to be done about it.

    Args:
        name: of the entry.
        action: what has to become of the run.
        culprit: the rank that failed first; None where it is no single rank, or nothing failed.
        why: what happens, in one line.
        starts: the most times that a process may be started. A failure that would come back every time may be tried
            once more, since only its return shows that.
        samples: ids of which at least one has to be named.
        before, item, in_step, after_loss, resume, loader, timeout: parts of the script.
        options: further options of `accel launch`.
        environment: further variables of the launch.
    """

    name: str
    action: Action
    culprit: int | None
    why: str
    starts: int = 2
    samples: tuple[int, ...] = ()
    before: str = ""
    item: str = ""
    in_step: str = ""
    after_loss: str = ""
    resume: str = "accelerator.load_state(missing_ok=True)"
    loader: str = _IN_ORDER
    timeout: int = 60
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def script(self) -> str:
        """The text of the script."""
        return _SCRIPT.format(
            why=self.why,
            before=self.before.strip("\n"),
            item=_indented(self.item, 8),
            resume=_indented(self.resume, 4),
            in_step=_indented(self.in_step, 12),
            after_loss=_indented(self.after_loss, 12),
            loader=self.loader,
            timeout=self.timeout,
        )


def _indented(code: str, columns: int) -> str:
    return "\n".join(" " * columns + line if line else "" for line in code.strip("\n").splitlines())


_SIGNALLED: Final = """
if RANK == {rank} and {when}:
    os.kill(os.getpid(), signal.{name})
    time.sleep(60)
"""


def _signalled(name: str, rank: int, when: str) -> str:
    return _SIGNALLED.format(name=name, rank=rank, when=when)


_HANG: Final = ("--hang_timeout", "8")

_FAILURES: Final = (
    # ------------------------------------------------------------ processes that a signal ends
    Failure(
        "segmentation_fault_once",
        Action.RESTART,
        1,
        "Rank 1 has a segmentation fault in step 5 of the first start.",
        in_step=_signalled("SIGSEGV", 1, "START == 0 and step == 5"),
    ),
    Failure(
        "segmentation_fault_every_time",
        Action.STOP,
        1,
        "Rank 1 has a segmentation fault before its first step, at every start.",
        before=_signalled("SIGSEGV", 1, "True"),
    ),
    Failure(
        "killed_once_at_the_start",
        Action.RESTART,
        0,
        "Rank 0 is killed in step 0 of the first start, before any progress.",
        in_step=_signalled("SIGKILL", 0, "START == 0 and step == 0"),
    ),
    Failure(
        "killed_every_time",
        Action.STOP,
        1,
        "Rank 1 is killed in step 1 at every start; a restart makes no progress.",
        in_step=_signalled("SIGKILL", 1, "step == 1"),
        starts=3,
    ),
    Failure(
        "killed_twice_with_progress",
        Action.RESTART,
        1,
        "Rank 1 is killed in step 5 of the first start and in step 9 of the second; each start gets further.",
        in_step=_signalled("SIGKILL", 1, "(START, step) in ((0, 5), (1, 9))"),
        starts=3,
    ),
    Failure(
        "asked_to_end_once",
        Action.RESTART,
        1,
        "Rank 1 sends SIGTERM to itself in step 5 of the first start.",
        in_step=_signalled("SIGTERM", 1, "START == 0 and step == 5"),
    ),
    Failure(
        "exit_code_of_a_killed_container",
        Action.RESTART,
        1,
        "Rank 1 ends with exit code 137 in step 5 of the first start, as a container does that was killed.",
        in_step="if RANK == 1 and START == 0 and step == 5:\n    os._exit(137)",
    ),
    # ------------------------------------------------------------ exceptions that come back
    Failure(
        "exception_at_rank_0",
        Action.STOP,
        0,
        "Rank 0 raises a ValueError in step 2 at every start; rank 1 loses its connection and is a victim.",
        in_step="if RANK == 0 and step == 2:\n    raise ValueError('the shapes do not match')",
    ),
    Failure(
        "exception_at_rank_1",
        Action.STOP,
        1,
        "Rank 1 raises a KeyError in step 2 at every start; rank 0 loses its connection and is a victim.",
        in_step="if RANK == 1 and step == 2:\n    raise KeyError('labels')",
    ),
    Failure(
        "exception_at_all_ranks",
        Action.STOP,
        None,
        "Both ranks raise the same TypeError in step 0 at every start.",
        in_step="if step == 0:\n    len(None)",
    ),
    Failure(
        "exception_after_progress",
        Action.STOP,
        1,
        "Rank 1 raises a ZeroDivisionError in step 6 at every start; the checkpoint of step 4 brings no start further.",
        in_step="if RANK == 1 and step == 6:\n    1 / 0",
    ),
    Failure(
        "exception_that_moves",
        Action.RESTART,
        0,
        "Rank 0 raises the same RuntimeError in steps 5 and 9, one in each start; each start gets further.",
        in_step="if RANK == 0 and (START, step) in ((0, 5), (1, 9)):\n    raise RuntimeError('the cache is cold')",
        starts=3,
    ),
    Failure(
        "another_exception_every_time",
        Action.STOP_WITH_BUDGET,
        1,
        "Rank 1 loses another peer at each start and in another step, without end and without progress.",
        in_step="if RANK == 1 and step == START % 3:\n    raise ConnectionResetError(f'peer {START} is lost')",
        options=("--max_restarts", "3"),
        starts=4,
    ),
    Failure(
        "assertion",
        Action.STOP,
        1,
        "An assertion of the script fails at rank 1 in step 1 at every start.",
        in_step="assert RANK == 0 or step != 1, 'the batch is empty'",
    ),
    Failure(
        "recursion",
        Action.STOP,
        0,
        "Rank 0 recurses without end in step 1 at every start.",
        before="def deeper(depth):\n    return deeper(depth + 1)\n",
        in_step="if RANK == 0 and step == 1:\n    deeper(0)",
    ),
    Failure(
        "unpicklable_object",
        Action.STOP,
        0,
        "Rank 0 pickles a function without a name in step 1 at every start.",
        in_step="if RANK == 0 and step == 1:\n    import pickle\n\n    pickle.dumps(lambda: None)",
    ),
    Failure(
        "loss_that_is_not_finite",
        Action.STOP,
        1,
        "The loss of rank 1 is NaN from step 3 on at every start, and the script raises.",
        after_loss="""
if RANK == 1 and step >= 3:
    loss = loss * float("nan")
if not loss.isfinite():
    raise FloatingPointError(f"the loss of step {step} is {loss.item()}")
""",
        # Each start has other samples, so that none of them can be blamed.
        loader="batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(START)",
        resume="pass",
    ),
    # ------------------------------------------------------------ scripts that cannot begin
    Failure(
        "module_that_is_missing",
        Action.STOP,
        None,
        "The script imports a module that is not installed.",
        before="import a_module_that_nobody_installed",
    ),
    Failure(
        "syntax_error",
        Action.STOP,
        None,
        "A module that the script imports has a syntax error.",
        before="""
(FOLDER / f"broken_{RANK}.py").write_text("def broken(:\\n")
sys.path.insert(0, str(FOLDER))
__import__(f"broken_{RANK}")
""",
    ),
    # ------------------------------------------------------------ ends that are no exceptions
    Failure(
        "exit_0_early",
        Action.STOP,
        1,
        "Rank 1 ends with exit code 0 in step 2 at every start, while rank 0 waits for it.",
        in_step="if RANK == 1 and step == 2:\n    sys.exit(0)",
    ),
    Failure(
        "exit_code_3",
        Action.STOP,
        1,
        "Rank 1 ends with exit code 3 in step 2 at every start.",
        in_step="if RANK == 1 and step == 2:\n    sys.exit(3)",
    ),
    Failure(
        "interrupted_by_a_person",
        Action.STOP,
        0,
        "Rank 0 raises KeyboardInterrupt in step 2: a person wants the run to end.",
        in_step="if RANK == 0 and step == 2:\n    raise KeyboardInterrupt",
        starts=1,
    ),
    Failure(
        "exception_at_exit",
        Action.FINISH,
        None,
        "A function registered with atexit raises at rank 1 after the training; Python reports it and exits with 0.",
        before="""
import atexit


def fail_late():
    raise RuntimeError("too late to matter")


if RANK == 1:
    atexit.register(fail_late)
""",
        starts=1,
    ),
    Failure(
        "exception_in_a_thread",
        Action.FINISH,
        None,
        "A thread of rank 0 raises in step 2; Python reports it, and training goes on.",
        in_step="""
if RANK == 0 and step == 2:
    thread = threading.Thread(target=int, args=("no number",))
    thread.start()
    thread.join()
""",
        starts=1,
    ),
    # ------------------------------------------------------------ memory and disk
    Failure(
        "device_out_of_memory",
        Action.STOP_WITH_MEMORY,
        0,
        "Rank 0 runs out of device memory in step 1.",
        in_step="""
if RANK == 0 and step == 1:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 3.42 GiB is"
        " free. Of the allocated memory 70.11 GiB is allocated by PyTorch."
    )
""",
        starts=1,
    ),
    Failure(
        "host_out_of_memory",
        Action.STOP_WITH_MEMORY,
        1,
        "Rank 1 raises MemoryError in step 1, for more bytes than a machine has.",
        in_step="if RANK == 1 and step == 1:\n    bytearray(2**62)",
        starts=1,
    ),
    Failure(
        "disk_full",
        Action.STOP,
        0,
        "Rank 0 finds no space left on the device in step 3 at every start.",
        in_step="""
if RANK == 0 and step == 3:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(FOLDER / "log"))
""",
    ),
    Failure(
        "file_too_large",
        Action.STOP,
        0,
        "The limit for the size of a file lets no checkpoint of rank 0 be written, at every start.",
        in_step="""
if RANK == 0 and step == 3:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
""",
    ),
    Failure(
        "filesystem_hiccup",
        Action.RESTART,
        1,
        "Rank 1 finds a stale file handle in step 5 of the first start only.",
        in_step="""
if RANK == 1 and START == 0 and step == 5:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/mnt/shared/part-7")
""",
    ),
    # ------------------------------------------------------------ network
    Failure(
        "port_taken_once",
        Action.RESTART,
        0,
        "Rank 0 listens on a port that is taken, at the first start only.",
        before="""
if RANK == 0 and START == 0:
    import socket

    first, second = socket.socket(), socket.socket()
    first.bind(("127.0.0.1", 0))
    first.listen()
    second.bind(first.getsockname())
""",
    ),
    Failure(
        "peer_lost_twice",
        Action.RESTART,
        0,
        "Rank 0 raises ConnectionResetError in step 5 of the first start and in step 9 of the second.",
        in_step="""
if RANK == 0 and (START, step) in ((0, 5), (1, 9)):
    raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
""",
        starts=3,
    ),
    Failure(
        "peer_timeout",
        Action.RESTART,
        1,
        "Rank 1 is late by a minute in step 2 of the first start; rank 0, the victim, times out in its collective.",
        in_step="if RANK == 1 and START == 0 and step == 2:\n    time.sleep(60)",
        timeout=6,
    ),
    # ------------------------------------------------------------ hangs
    Failure(
        "hang_in_python_once",
        Action.RESTART,
        1,
        "Rank 1 loops without end in step 2 of the first start, while rank 0 waits in a collective.",
        in_step="while RANK == 1 and START == 0 and step == 2:\n    time.sleep(0.1)",
        options=_HANG,
    ),
    Failure(
        "hang_in_python_every_time",
        Action.STOP,
        1,
        "Rank 1 loops without end in step 2 at every start, while rank 0 waits in a collective.",
        in_step="while RANK == 1 and step == 2:\n    time.sleep(0.1)",
        options=_HANG,
    ),
    Failure(
        "different_collectives",
        Action.STOP,
        None,
        "In step 2, at every start, rank 0 waits in one barrier more than rank 1.",
        in_step="if RANK == 0 and step == 2:\n    accelerator.wait_for_everyone()",
        options=_HANG,
    ),
    # ------------------------------------------------------------ samples
    Failure(
        "bad_sample",
        Action.STOP_AND_NAME_SAMPLES,
        0,
        "Sample 9 cannot be read, at every start.",
        item="if index == 9:\n    raise ValueError('not an image')",
        samples=(9,),
    ),
    Failure(
        "sample_that_kills",
        Action.STOP_AND_NAME_SAMPLES,
        0,
        "Reading sample 9 is a segmentation fault, at every start.",
        item=_signalled("SIGSEGV", 0, "index == 9"),
        samples=(8, 9),
    ),
    Failure(
        "same_sample_in_another_step",
        Action.STOP_AND_NAME_SAMPLES,
        None,
        "Each start shuffles anew and forgets its progress; the step with sample 7 fails on whichever rank has it.",
        in_step="if 7 in ids:\n    raise RuntimeError('the label is out of range')",
        loader="batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(START)",
        resume="pass",
        samples=(7,),
    ),
    Failure(
        "exception_in_a_worker",
        Action.STOP_AND_NAME_SAMPLES,
        1,
        "A worker of the DataLoader of rank 1 cannot read sample 6, at every start.",
        item="if index == 6:\n    raise RuntimeError('truncated file')",
        loader="batch_size=2, num_workers=1",
        samples=(6, 7),
    ),
    Failure(
        "worker_killed_once",
        Action.RESTART,
        1,
        "The worker of the DataLoader of rank 1 is killed when it reads sample 6, at the first start only.",
        item="if START == 0 and index == 6:\n    os.kill(os.getpid(), signal.SIGKILL)",
        loader="batch_size=2, num_workers=1",
    ),
)

CATALOGUE: Final = {failure.name: failure for failure in _FAILURES}
"""By name, the failures."""
