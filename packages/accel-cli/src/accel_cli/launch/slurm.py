"""The Slurm launcher: starts a step in an allocation, or submits a job from outside.

Inside an allocation, `srun` starts one task on each node, which runs `accel launch` again to start the processes of its
node. Outside, `sbatch` submits a script that contains only this launch.

If the processes save their state and end early (exit code 75), the job is queued again: Slurm then restarts the script,
and the processes resume.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Final, NamedTuple

from accel_cli.launch.failures import shell_code
from accel_cli.launch.interface import LaunchPlan
from accel_cli.launch.local import Local
from accel_cli.launch.settings import SlurmSettings
from accel_cli.launch.signals import ENDING, Inbox
from accel_cli.launch.torchrun import Torchrun
from accel_state.clusters.systems import in_batch_script
from accel_state.errors import Conflict, LaunchError, NotFound
from accel_state.exit_codes import RESUME
from accel_state.network import SECRET_VARIABLE, new_secret
from accel_state.untrusted import printable

if TYPE_CHECKING:
    from accel_cli.launch.interface import LaunchRequest

__all__ = ("Slurm", "SlurmStep", "Submission")

_SLURM_FAILURE: Final = "Cannot launch with Slurm."
_POLL_INTERVAL_S: Final = 1.0
_KILL_TIMEOUT_S: Final = 40.0
"""Seconds that Slurm may need to end a killed step; its own KillWait is 30 by default."""

_NOT_PASSED_ON: Final = ("--launcher", "--max_restarts", "--prefix_output", "--machine_rank", "--wait")
"""Options for the launcher of the allocation, which it does not pass to the launchers of the nodes."""

_FIRST_CAUSE_PATTERN: Final = re.compile(rb"srun: error: [^:\n]+: tasks? [\d,-]+: (.+)")
_EXIT_CODE_PATTERN: Final = re.compile(r"Exited with exit code (\d+)")

_FINAL_STATES: Final = frozenset(
    ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "PREEMPTED")
)


class SlurmStep(NamedTuple):
    """How a step of an allocation is supervised.

    Args:
        job: number of the job.
        name: unique name of the step.
        requeue: whether the job is queued again after its processes saved their state and ended early.
        restarts: largest number of restarts of the step after failures.
    """

    job: str
    name: str
    requeue: bool
    restarts: int


class Submission(NamedTuple):
    """A job to submit.

    Args:
        script: the batch script.
        wait: whether to wait until the job has ended.
    """

    script: str
    wait: bool


class Slurm:
    """Starts processes through Slurm; see `Launcher`."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        self._here: Local | Torchrun | None = None

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Plan the processes of this node in a step, a step in an allocation, or a job outside.

        Raises:
            Conflict: the allocation has fewer nodes than the settings require.
        """
        environ = request.machine.environ
        if "SLURM_JOB_ID" not in environ:
            return self._submission(request)
        if not in_batch_script(environ):
            self._here = Torchrun() if request.settings["num_machines"].value > 1 else Local()
            return self._here.plan(request)
        return self._step(request)

    def run(self, plan: LaunchPlan) -> int:
        """Run the step, or submit the job, and wait for it if the plan requires it; see `Launcher`.

        Raises:
            LaunchError: Slurm rejected the job.
        """
        if self._here is not None:
            return self._here.run(plan)
        with self._inbox as inbox:
            return _submit(plan, inbox) if isinstance(plan.details, Submission) else _run_step(plan, inbox)

    def stop(self) -> None:
        """End the run as SIGTERM does."""
        if self._here is not None:
            self._here.stop()
        self._inbox.post(signal.SIGTERM)

    def _step(self, request: LaunchRequest) -> LaunchPlan:
        settings, environ = request.settings, request.machine.environ
        job, name, nodes = environ["SLURM_JOB_ID"], f"accel-{os.getpid()}", _nodes(request)
        requeue = settings["slurm_requeue"].value and environ.get("ENVIRONMENT") == "BATCH"
        cpus = environ.get("SLURM_CPUS_PER_TASK", "")
        argv = (
            "srun",
            f"--job-name={name}",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            "--ntasks-per-node=1",
            # All processes of a node share its processors.
            "--cpu-bind=none",
            *((f"--cpus-per-task={cpus}",) if cpus else ()),
            *(("--label",) if settings["prefix_output"].value else ()),
            "--kill-on-bad-exit=1",
            *_launch_again(request, _NOT_PASSED_ON),
        )
        return LaunchPlan(
            {},
            argv,
            "slurm",
            world_size=settings["num_processes"].value,
            inherited=environ,
            grace_period=settings["grace_period"].value,
            quiet=request.quiet,
            details=SlurmStep(job, name, requeue, settings["max_restarts"].value),
        )

    def _submission(self, request: LaunchRequest) -> LaunchPlan:
        settings = request.settings
        own = settings.instance(SlurmSettings)
        options = (
            f"--job-name={os.path.basename(request.script.target)}",
            f"--nodes={settings['num_machines'].value}",
            "--ntasks-per-node=1",
            "--output=slurm-%j.out",
            # Keep the output from before the job was queued again.
            "--open-mode=append",
            *((f"--signal=B:USR1@{own.slurm_signal}",) if own.slurm_signal else ()),
            "--requeue" if own.slurm_requeue else "--no-requeue",
            # Of two options with one name, Slurm uses the last.
            *own.slurm_options,
        )
        command = shlex.join(_launch_again(request, ("--launcher", "--wait")))
        script = "\n".join(("#!/bin/bash", *(f"#SBATCH {shlex.quote(one)}" for one in options), f"exec {command}", ""))
        return LaunchPlan(
            {},
            ("sbatch", "--parsable"),
            "slurm",
            world_size=settings["num_processes"].value,
            inherited=request.machine.environ,
            quiet=request.quiet,
            details=Submission(script, own.slurm_wait),
        )


def _launch_again(request: LaunchRequest, dropped: Sequence[str]) -> tuple[str, ...]:
    """The command that repeats this launch, without some of its options."""
    options = [word for word in request.options if word.partition("=")[0].replace("--no_", "--") not in dropped]
    script = request.script
    start = (request.machine.python, "-m", "accel_cli.main", "launch", "--launcher=slurm")
    return (*start, *options, script.target, *script.arguments)


def _nodes(request: LaunchRequest) -> int:
    """Number of nodes of the step: that of the launch if it is given, else all nodes of the allocation."""
    environ, machines = request.machine.environ, request.settings["num_machines"]
    text = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", "1"))
    there = int(text) if text.isdecimal() else 1
    nodes, processes = (int(machines.value) if machines.is_set else there), request.settings["num_processes"]
    if nodes > there:
        raise Conflict(
            f"Cannot combine {machines.text} and the allocation of job {environ['SLURM_JOB_ID']}.",
            f"The allocation has {there} node(s).",
            f"Request an allocation of {nodes} nodes, or correct --num_machines.",
        )
    if processes.value is not None and processes.value % nodes:
        raise Conflict(
            f"Cannot start {processes.text} on {nodes} nodes.",
            "Every node starts the same number of processes.",
            f"Set --num_processes to a multiple of {nodes}.",
        )
    return nodes


def _run_step(plan: LaunchPlan, inbox: Inbox) -> int:
    """Run the step, restart it after failures if allowed, and queue the job again after it saved."""
    step: SlurmStep = plan.details
    restart = 0
    while True:
        running = _Running(plan, step)
        code = running.wait(inbox)
        if code == RESUME and step.requeue and not running.stopped_for_good:
            _requeue(step.job)
        if code in (0, RESUME) or running.signalled or restart == step.restarts:
            return code
        restart += 1
        if not plan.quiet:
            _tell(f"The step failed with exit code {code}. Restarting it ({restart} of {step.restarts}).")


class _Running:
    """Supervises one step from start to end."""

    def __init__(self, plan: LaunchPlan, step: SlurmStep) -> None:
        self._plan, self._step = plan, step
        environment = {name: value for name, value in plan.inherited.items() if name not in plan.removed}
        # srun passes its environment on to the tasks of all nodes.
        environment.setdefault(SECRET_VARIABLE, new_secret())
        try:
            self._srun = subprocess.Popen(
                plan.argv, env={**environment, **plan.environment}, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise _absent("srun", error) from None
        self._cause: int | None = None
        self._errors = threading.Thread(target=self._copy_errors, args=(self._srun.stderr,), daemon=True)
        self._errors.start()
        self.signalled: int | None = None
        """The first signal that ended the step."""
        self.stopped_for_good = False
        """Whether the step was killed without a grace period."""

    def wait(self, inbox: Inbox) -> int:
        """Forward signals until the step has ended, and return its exit code."""
        deadline = float("inf")
        try:
            while self._srun.poll() is None:
                for number in inbox.wait(min(_POLL_INTERVAL_S, max(deadline - time.monotonic(), 0.0))):
                    if number not in ENDING:
                        self._srun.send_signal(number)
                    elif self.signalled is None:
                        # srun kills its step at a signal; with scancel, the processes can save their state.
                        self.signalled, deadline = number, time.monotonic() + self._plan.grace_period
                        self._signal("TERM")
                    else:
                        deadline = time.monotonic()
                if time.monotonic() >= deadline:
                    self.stopped_for_good, deadline = True, time.monotonic() + _KILL_TIMEOUT_S
                    self._signal("KILL")
        finally:
            if self._srun.poll() is None:
                self._signal("KILL")
                self._srun.terminate()
            self._srun.wait()
            self._errors.join(_POLL_INTERVAL_S)
        code = shell_code(self._srun.returncode)
        if code and self._cause is not None:
            code = self._cause
        if self.signalled is not None and code not in (0, RESUME):
            return shell_code(-self.signalled)
        return code

    def _signal(self, name: str) -> None:
        """Send a signal to the tasks of the step, which is found by its name."""
        listed = _ask("squeue", "--steps", "--noheader", f"--jobs={self._step.job}", "--format=%i %j")
        for line in listed.splitlines():
            number, _, called = line.strip().partition(" ")
            if called.strip() == self._step.name:
                _ask("scancel", f"--signal={name}", number)
                return
        # The step has not started, or has ended.
        self._srun.terminate()

    def _copy_errors(self, source: IO[bytes]) -> None:
        """Print the errors of srun, and find the task that ended first: srun returns the highest of all codes."""
        for line in source:
            if self._cause is None:
                match = _FIRST_CAUSE_PATTERN.match(line)
                self._cause = _code_of(match[1].decode(errors="replace").strip()) if match is not None else None
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()


def _code_of(said: str) -> int | None:
    """The exit code in a message of srun."""
    match = _EXIT_CODE_PATTERN.match(said)
    if match is not None:
        return int(match[1])
    numbers = {signal.strsignal(number): number for number in signal.valid_signals()}
    number = numbers.get(said.removesuffix(" (core dumped)"))
    return None if number is None else shell_code(-number)


def _requeue(job: str) -> None:
    """Queue the job of this script again; Slurm ends the script when it does."""
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        # The cluster may requeue it automatically (RequeueExit), or may already have preempted the job.
        _tell(f"Slurm did not queue job {job} again: {done.stderr.strip()}")


def _submit(plan: LaunchPlan, inbox: Inbox) -> int:
    """Submit the job; return its exit code after waiting for it, else 0."""
    submission: Submission = plan.details
    try:
        done = subprocess.run(
            plan.argv, input=submission.script, capture_output=True, text=True, env=dict(plan.inherited)
        )
    except OSError as error:
        raise _absent("sbatch", error) from None
    if done.returncode:
        raise LaunchError(
            "Cannot submit the job to Slurm.",
            f"sbatch answered: {done.stderr.strip() or f'exit code {done.returncode}'}",
            "Correct the options of --slurm_option; `sinfo` lists the partitions.",
        )
    job = done.stdout.strip().partition(";")[0]
    if not submission.wait:
        output = _job(job).get("StdOut", "")
        _tell(f"Submitted Slurm job {job}. Its output is written to {output}. `squeue --job {job}` shows its state.")
        return 0
    return _follow(job, inbox, plan.quiet)


def _follow(job: str, inbox: Inbox, quiet: bool) -> int:
    """Print the output of a job until the job has ended; a signal that ends this launcher cancels the job."""
    state, read, signalled = "", 0, 0
    while True:
        signals = [number for number in inbox.wait(_POLL_INTERVAL_S) if number in ENDING]
        if signals and not signalled:
            signalled = signals[0]
            _ask("scancel", job)
            _tell(f"Slurm job {job} was cancelled by {signal.Signals(signalled).name}.")
        state_of_job = _job(job)
        read = _print_from(state_of_job.get("StdOut", ""), read)
        if state_of_job.get("JobState") != state and not quiet:
            state = state_of_job.get("JobState", "UNKNOWN")
            _tell(f"Slurm job {job} is {state}.")
        if state_of_job.get("JobState", "UNKNOWN") not in _FINAL_STATES and state_of_job:
            continue
        _print_from(state_of_job.get("StdOut", ""), read)
        if signalled:
            return shell_code(-signalled)
        code, _, number = state_of_job.get("ExitCode", "1:0").partition(":")
        if int(code) or int(number):
            return int(code) or shell_code(-int(number))
        return 0 if state == "COMPLETED" else 1


def _print_from(path: str, read: int) -> int:
    """Print the content of a file after its first `read` bytes, and return the number of bytes read so far."""
    try:
        with open(path, "rb") as file:
            file.seek(read)
            text = file.read()
    except OSError:
        # The job has not started.
        return read
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
    return read + len(text)


def _job(job: str) -> dict[str, str]:
    """Slurm's information about a job; empty if Slurm has forgotten it."""
    words = shlex.split(_ask("scontrol", "--oneliner", "show", "job", job).replace("'", ""))
    return dict(word.split("=", 1) for word in words if "=" in word)


def _ask(*words: str) -> str:
    done: Sequence[str] = words
    try:
        return subprocess.run(done, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    except OSError as error:
        raise _absent(words[0], error) from None


def _absent(program: str, error: OSError) -> NotFound:
    return NotFound(
        _SLURM_FAILURE,
        f"`{program}` cannot be started: {error.strerror or error}.",
        "Log in to a node of a Slurm cluster, or remove --launcher slurm.",
    )


def _tell(text: str) -> None:
    print(printable(f"accel launch: {text}"), file=sys.stderr, flush=True)
