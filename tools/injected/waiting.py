"""Runs in which one process does not come, is stopped, or is cut off.

A run survives such a fault when every other process ends within its deadline and a few seconds more, says which process
it waited for, and none is left. The processes are those of this file: `accel launch tools/injected/waiting.py ...`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

from faults.sweeps import Tally

from accel_state.errors import NotOffered

__all__ = ("absences", "cuts")

DEADLINE: Final = 10.0
"""Seconds that a collective or a save may take."""

MORE: Final = 5.0
"""Seconds beyond it until a process has said what it waits for and has ended, on a machine with idle processors."""

START: Final = 120.0
"""Seconds until all processes of a run have met, on a busy machine."""

CALLS: Final = ("gather", "barrier", "ddp", "fsdp2", "save")
"""What the others are in: two collectives, backward with two backends, and saving."""


def absences(folder: Path, every: int, fault: str) -> Tally:
    """Let each of two processes meet a fault while the other one is in each of the calls.

    Args:
        folder: for what the runs write.
        every: of so many places one is tried.
        fault: "loop" in Python, "stopped" by a signal, in "file" IO, in "native" code, or one that "leaves" the run.
    """
    tally = Tally("one of two processes does not come")
    places = [(call, culprit) for call in CALLS for culprit in (0, 1)]
    for call, culprit in places[::every]:
        below = folder / f"{call}{culprit}"
        below.mkdir()
        tally.count(f"{call}, process {culprit}", absent(below, call, fault, culprit))
    return tally


def cuts(folder: Path, every: int, processes: int) -> Tally:
    """Cut the link between two machines of `processes` processes each, while they are in each of the calls.

    Raises:
        NotOffered: no links between network namespaces can be made here.
    """
    if not _has_namespaces():
        raise NotOffered(
            "Cannot cut the link between two machines.",
            "Network namespaces cannot be made here: that needs root on Linux, and `ip`.",
            "Run this sweep elsewhere.",
        )
    tally = Tally("packets are lost")
    for call in CALLS[::every]:
        (folder / call).mkdir()
        tally.count(call, cut(folder / call, call, processes))
    return tally


def absent(folder: Path, call: str, fault: str, culprit: int) -> str | None:
    """What is wrong when process `culprit` of two meets a fault in place of a call; None when all is well."""
    run = _Run(folder, [["--num_processes=2", "--grace_period=2"]], [0, 0], [call, fault, str(culprit)])
    words = "is (no longer there|gone)" if fault == "leaves" and call != "save" else "(is|did)"
    return run.wrong({1 - culprit: f"(rank|process) {culprit} {words}"}, begun=lambda: None)


def cut(folder: Path, call: str, processes: int) -> str | None:
    """What is wrong when the link between two machines of `processes` processes each is cut; None when all is well."""
    with _machines() as (prefixes, break_link):
        address = "10.231.7.1"
        arguments = [
            [
                *("--num_machines=2", f"--machine_rank={machine}", f"--num_processes={2 * processes}"),
                *(f"--main_process_ip={address}", "--main_process_port=29531", "--grace_period=2"),
            ]
            for machine in (0, 1)
        ]
        places = [machine for machine in (0, 1) for _ in range(processes)]
        run = _Run(folder, arguments, places, [call, "cut", "-1"], prefixes)
        silent = "(is|are) silent"
        others = (f"(rank {processes}|ranks 2-3) {silent}", f"(rank 0|ranks 0-1) {silent}")
        return run.wrong({rank: others[place] for rank, place in enumerate(places)}, begun=break_link)


class _Run:
    """The processes of one run, on one machine or several.

    Args:
        folder: for what they write.
        launches: by machine, arguments of accel launch.
        places: by rank, its machine.
        arguments: what the processes are called with.
        prefixes: by machine, what begins a command there.
    """

    def __init__(
        self,
        folder: Path,
        launches: Sequence[Sequence[str]],
        places: Sequence[int],
        arguments: Sequence[str],
        prefixes: Sequence[Sequence[str]] = ((),),
    ) -> None:
        self.folder, self.places = folder, places
        launcher = [sys.executable, "-m", "accel_cli.main"]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RES_OPTIONS": "attempts:0",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "GLOO_SOCKET_IFNAME": "veth" if len(launches) > 1 else "lo",
        }
        self.launched = []
        for machine, (launch, prefix) in enumerate(zip(launches, prefixes, strict=True)):
            command = [*prefix, *launcher, "launch", *launch, __file__, str(folder), *arguments]
            with open(folder / f"output{machine}", "wb") as output:
                self.launched.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env=environment,
                        start_new_session=True,
                    )
                )

    def wrong(self, expected: Mapping[int, str], begun: Callable[[], None]) -> str | None:
        """What is wrong with how the run ends; None when all is well.

        Args:
            expected: by rank that is to end by itself, what its machine's output must say.
            begun: called when every process is where the fault strikes.
        """
        pids: dict[int, int] = {}
        try:
            limit = time.monotonic() + START
            while len(pids) < len(self.places):
                if time.monotonic() > limit or any(one.poll() is not None for one in self.launched):
                    return f"the run did not begin: {self._output(0)[-2000:]}"
                time.sleep(0.05)
                pids = self._pids()
            begun()
            return self._ending(pids, expected)
        finally:
            self._kill(pids)

    def _ending(self, pids: Mapping[int, int], expected: Mapping[int, str]) -> str | None:
        limit = time.monotonic() + DEADLINE + _more()
        late = [rank for rank in expected if not _is_over(partial(_alive, pids[rank]), limit)]
        wrong = [f"rank {rank} did not end in time" for rank in late]
        for number, launcher in enumerate(self.launched):
            # It gives the others some seconds after the first has failed.
            if not _is_over(partial(_runs, launcher), limit + 15):
                wrong.append(f"launcher {number} did not end")
        for rank, words in expected.items():
            output = self._output(self.places[rank])
            if not re.search(words, output, re.IGNORECASE):
                wrong.append(f"the output of rank {rank} does not name {words!r}: {output[-3000:]}")
        wrong += [f"rank {rank} is left" for rank, pid in pids.items() if _alive(pid)]
        return "; ".join(wrong) or None

    def _pids(self) -> dict[int, int]:
        found = {}
        for path in self.folder.glob("pid*"):
            text = path.read_text(encoding="utf-8")
            if text:
                found[int(path.name[3:])] = int(text)
        return found

    def _output(self, machine: int) -> str:
        return (self.folder / f"output{machine}").read_text(encoding="utf-8", errors="replace")

    def _kill(self, pids: Mapping[int, int]) -> None:
        for pid in [*pids.values(), *(one.pid for one in self.launched if one.poll() is None)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for one in self.launched:
            one.wait(60)


def _is_over(condition: Callable[[], bool], limit: float) -> bool:
    """Whether a condition ends before a moment of the monotonic clock."""
    while (goes_on := condition()) and time.monotonic() < limit:
        time.sleep(0.05)
    return not goes_on


def _runs(launcher: subprocess.Popen[bytes]) -> bool:
    return launcher.poll() is None


def _more() -> float:
    """`MORE` on a machine as busy as this one is."""
    return MORE * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _has_namespaces() -> bool:
    """Whether links between network namespaces can be made and cut here."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"accel-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode != 0:
        return False
    return subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def _machines() -> Iterator[tuple[list[list[str]], Callable[[], None]]]:
    """Two network namespaces with a link between them: what begins a command in each, and what cuts the link."""
    names = [f"accel-{os.getpid()}-{machine}" for machine in (0, 1)]
    switch = f"accel-{os.getpid()}-switch"

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def break_link() -> None:
        # The interfaces of both stay up, and packets are lost.
        ip("-n", switch, "link", "set", "port1", "nomaster")

    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for machine, name in enumerate(names):
            port = f"port{machine}"
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "veth", "type", "veth", "peer", "name", port, "netns", switch)
            ip("-n", name, "addr", "add", f"10.231.7.{machine + 1}/24", "dev", "veth")
            ip("-n", name, "link", "set", "veth", "up")
            ip("-n", switch, "link", "set", port, "master", "bridge")
            ip("-n", switch, "link", "set", port, "up")
        yield [["ip", "netns", "exec", name] for name in names], break_link
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


# ---------------------------------------------------------------------------- the processes


def main(folder: str, call: str, fault: str, culprit: str) -> None:
    """One process of a run: comes to a call together with the others, and then once more, without the culprit."""
    import torch

    from accel_torch import Accelerator, InitProcessGroupKwargs, ProjectConfiguration, where_is_everyone

    accelerator = Accelerator(
        cpu=True,
        backend=call if call in ("ddp", "fsdp2") else None,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=DEADLINE))],
        project_config=ProjectConfiguration(project_dir=f"{folder}/project", deadline=DEADLINE),
    )
    net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 1))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def backward() -> None:
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(4, 8)).sum())
        optimizer.step()

    calls: dict[str, Callable[[], Any]] = {
        "gather": lambda: accelerator.gather(torch.ones(2)),
        "barrier": accelerator.wait_for_everyone,
        "ddp": backward,
        "fsdp2": backward,
        "save": lambda: accelerator.save_state(f"{folder}/project/state"),
    }
    calls[call]()
    while "unknown" in where_is_everyone():
        time.sleep(0.05)
    accelerator.wait_for_everyone()
    time.sleep(1.0)
    accelerator.wait_for_everyone()
    partial = Path(folder, f"partial{accelerator.process_index}")
    partial.write_text(str(os.getpid()), encoding="utf-8")
    partial.replace(Path(folder, f"pid{accelerator.process_index}"))
    if fault == "cut":
        while True:
            calls[call]()
            time.sleep(0.1)
    if accelerator.process_index == int(culprit):
        _meet_fault(fault, Path(folder))
        return
    calls[call]()


def _meet_fault(fault: str, folder: Path) -> None:
    if fault == "loop":
        while True:
            pass
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "file":
        os.mkfifo(folder / "fifo")
        (folder / "fifo").read_bytes()
    elif fault == "native":
        ctypes.PyDLL(None).sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
