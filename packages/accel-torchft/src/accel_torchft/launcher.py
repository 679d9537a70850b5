"""The launcher: starts a lighthouse and one `accel launch` for each local replica, and restarts killed replicas.

A replica that ends with a Python error ends the run, since the others would raise the same error. A replica that a
signal killed, or that requests a restart (exit code 75), is restarted within a budget while the others continue. When a
replica has finished, restarted replicas that have not joined yet are ended, because they would train alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from accel_cli.launch.devices import visible
from accel_cli.launch.failures import ending, shell_code
from accel_cli.launch.interface import RUNNER, LaunchPlan, LaunchRequest, Machine
from accel_cli.launch.output import Relay
from accel_cli.launch.run_script import PARENT_VARIABLE
from accel_cli.launch.settings import SupervisionSettings
from accel_cli.launch.signals import ENDING, Inbox
from accel_state.devices.specs import SPECS
from accel_state.errors import LaunchError, SettingError
from accel_state.exit_codes import RESUME
from accel_state.network import loopback_variables
from accel_torchft.config import (
    HOST_VARIABLE,
    JOINED_VARIABLE,
    LEFT,
    LIGHTHOUSE_VARIABLE,
    REPLICA_VARIABLE,
    RESTARTED_VARIABLE,
    TorchFTConfig,
)
from accel_torchft.manifest import MANIFESTS

__all__ = ("ReplicaGroups",)

_TICK_S: Final = 0.2
_LIGHTHOUSE_TIMEOUT_S: Final = 120.0
"""Timeout in seconds for the lighthouse to print its address; importing torch takes most of it."""
_OUTPUT_TIMEOUT_S: Final = 2.0
_RESTARTED_EXPLANATION: Final = (
    "This replica had been restarted: its loader yields no batches in epochs that the others have finished, and the "
    "script must allow for that."
)
_MAX_FRUITLESS_DEATHS: Final = 3
"""The run ends when a replica dies this many times in a row without making a step."""


class _Details(NamedTuple):
    """Arguments of `run` beside the command line."""

    replicas: TorchFTConfig
    prefixed: bool
    join_timeout: float
    devices: Mapping[int, Mapping[str, str]]


class ReplicaGroups:
    """Starts the replicas of a run on this machine; see `accel_cli.launch.interface.Launcher`."""

    def __init__(self) -> None:
        self._inbox = Inbox()

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """The command line of a replica. It is the same for all; only their environment variables differ."""
        settings = request.settings
        replicas = settings.instance(TorchFTConfig)
        supervision = settings.instance(SupervisionSettings)
        left_out = ("--launcher", "--torchft_lighthouse", "--gpu_ids")
        options = [word for word in request.options if word.partition("=")[0] not in left_out]
        script = request.script
        argv = (request.machine.python, RUNNER, "module", "accel_cli.main", "launch", "--launcher=local", *options)
        backend = MANIFESTS.get(settings["backend"].value or "")
        local_steps = backend is not None and not backend.capabilities.equal_replicas
        join_timeout = replicas.join_timeout * (replicas.sync_every if local_steps else 1)
        devices = _devices_of_replicas(request, replicas)
        own: dict[str, str] = {}
        if replicas.lighthouse is None:
            # All replicas are on this machine.
            own |= {HOST_VARIABLE: "127.0.0.1", **loopback_variables(request.machine.environ)}
        else:
            own[LIGHTHOUSE_VARIABLE] = replicas.lighthouse
        return LaunchPlan(
            own,
            (*argv, script.target, *script.arguments),
            "torchft",
            processes=replicas.replica_groups * (settings["num_processes"].value or 1),
            inherited=request.machine.environ,
            grace_period=supervision.grace_period,
            prefix_output=supervision.prefix_output,
            quiet=request.quiet,
            details=_Details(replicas, supervision.prefix_output or replicas.replica_groups > 1, join_timeout, devices),
        )

    def run(self, plan: LaunchPlan) -> int:
        """Start the lighthouse and the replicas, and return the run's exit code; see `Launcher`.

        Raises:
            LaunchError: a process could not be started.
        """
        folder = tempfile.mkdtemp(prefix="accel-torchft-")
        base = {name: value for name, value in plan.inherited.items() if name not in plan.removed}
        base.update(plan.environment)
        try:
            with self._inbox as inbox:
                return _Run(plan, base, folder).until_the_end(inbox)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def stop(self) -> None:
        """End the run as SIGTERM does."""
        self._inbox.post(signal.SIGTERM)


def _replicas_here(config: TorchFTConfig) -> Sequence[int]:
    """Numbers of the replicas that this launch starts."""
    return config.replicas or range(config.replica_groups)


def _devices_of_replicas(request: LaunchRequest, config: TorchFTConfig) -> dict[int, Mapping[str, str]]:
    """Environment variables that make different devices visible to each replica; empty if there is at most one device.

    Raises:
        SettingError: there are fewer devices than processes.
    """
    settings, here = request.settings, _replicas_here(config)
    if settings["cpu"].value or (len(here) == 1 and settings["gpu_ids"].value is None):
        return {}
    ids = _device_ids(settings["gpu_ids"].value, request.machine)
    each = settings["num_processes"].value or max(len(ids) // len(here), 1)
    if len(ids) <= 1:
        return {}
    if len(ids) < each * len(here):
        raise SettingError(
            f"Cannot start {len(here)} replicas of {each} process(es) on this machine.",
            f"Each process needs its own device, and there are {len(ids)}: {', '.join(ids)}.",
            "Start fewer replicas here (--torchft_replicas), give --num_processes, or train on the CPU (--cpu).",
        )
    return {number: visible(",".join(ids[place * each : (place + 1) * each])) for place, number in enumerate(here)}


def _device_ids(ids: str | None, machine: Machine) -> list[str]:
    """Ids of the devices that the run may use: `ids`, else those visible to the launcher, else all."""
    if ids in (None, "all"):
        seen = (machine.environ.get(spec.visible_variable or "") for spec in SPECS.values())
        ids = next((text for text in seen if text), None)
    if ids is None:
        return [str(number) for number in range(machine.devices())]
    return [part.strip() for part in ids.split(",") if part.strip()]


@dataclass
class _Replica:
    """One replica, including its restarts."""

    number: int
    popen: subprocess.Popen[bytes]
    joined: str
    relay: Relay | None = None
    fruitless: int = 0
    """How many times in a row it died before it made a step."""
    told_to_end: bool = False
    restarted: bool = False
    died_at: float | None = None
    """When it died; None again after it has rejoined the others."""

    @property
    def joined_at(self) -> float | None:
        """When it first took part in a step since its last start."""
        return _written_at(self.joined)

    @property
    def left_at(self) -> float | None:
        """When it left the quorum at its end."""
        return _written_at(self.joined + LEFT)

    def signal(self, number: int) -> None:
        try:
            os.killpg(self.popen.pid, number)
        except (ProcessLookupError, PermissionError):
            # The process group has no process any more.
            pass


def _written_at(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:
        return None


class _Run:
    """Starts, watches and ends the lighthouse and the replicas of one plan."""

    def __init__(self, plan: LaunchPlan, environment: Mapping[str, str], folder: str) -> None:
        self._plan, self._environment, self._folder = plan, dict(environment), folder
        details: _Details = plan.details
        self._config, self._prefixed, self._join_timeout, self._devices = details
        self._lighthouse: subprocess.Popen[str] | None = None
        self._replicas: list[_Replica] = []
        self._restarts = 0
        self._starts = 0
        self._deadline: float | None = None
        self._signalled: int | None = None
        self._code: int | None = None
        self._error: LaunchError | None = None
        """Why the run ended, if the reason is not a replica."""

    def until_the_end(self, inbox: Inbox) -> int:
        """Start all processes and wait until the last one has ended."""
        try:
            if LIGHTHOUSE_VARIABLE not in self._environment:
                self._environment[LIGHTHOUSE_VARIABLE] = self._start_lighthouse(inbox)
            if self._signalled is None:
                for number in _replicas_here(self._config):
                    popen, joined, relay = self._start(number)
                    self._replicas.append(_Replica(number, popen, joined, relay))
            self._watch(inbox)
        finally:
            self._kill()
        for replica in self._replicas:
            if replica.relay is not None:
                replica.relay.finish(_OUTPUT_TIMEOUT_S)
        if self._error is not None:
            raise self._error
        if self._signalled is not None and self._code is None:
            self._say(f"ended by {signal.Signals(self._signalled).name}.")
            return shell_code(-self._signalled)
        return self._code or 0

    def _start_lighthouse(self, inbox: Inbox) -> str:
        config = self._config
        argv = [sys.executable, "-m", "accel_torchft.lighthouse"]
        argv += [str(config.heartbeat_timeout), str(self._join_timeout), str(config.min_replicas)]
        environment = {**self._environment, "RUST_LOG": self._environment.get("RUST_LOG", "error")}
        self._lighthouse = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
        lines: list[str] = []
        output = self._lighthouse.stdout
        reader = threading.Thread(target=lambda: lines.append(output.readline() if output else ""), daemon=True)
        reader.start()
        deadline = time.monotonic() + _LIGHTHOUSE_TIMEOUT_S
        while not lines and time.monotonic() < deadline and self._signalled is None:
            self._forward(inbox)
        address = lines[0].strip() if lines else ""
        if not address and self._signalled is None:
            code = self._lighthouse.poll()
            raise LaunchError(
                "Cannot start the lighthouse of torchft.",
                f"It {ending(code)} within {_LIGHTHOUSE_TIMEOUT_S:g} s and printed no address; see the output above.",
                "Run `python -m accel_torchft.lighthouse 5 60 1` to test it separately.",
            )
        return address

    def _start(self, number: int, again: bool = False) -> tuple[subprocess.Popen[bytes], str, Relay | None]:
        self._starts += 1
        joined = os.path.join(self._folder, f"joined-{number}-{self._starts}")
        own = {REPLICA_VARIABLE: str(number), JOINED_VARIABLE: joined, PARENT_VARIABLE: str(os.getpid())}
        own[RESTARTED_VARIABLE] = "1" if again else ""
        own["RUST_LOG"] = self._environment.get("RUST_LOG", "error")
        pipe = subprocess.PIPE if self._prefixed else None
        try:
            popen = subprocess.Popen(
                self._plan.argv,
                env={**self._environment, **own, **self._devices.get(number, {})},
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
            )
        except OSError as error:
            failure = f"Cannot start replica {number}: {' '.join(self._plan.argv[:4])}."
            raise LaunchError(
                failure, f"The system refused: {error}.", "Check the Python interpreter and the limits (ulimit -a)."
            ) from None
        return popen, joined, Relay(popen, f"[replica {number}] ") if self._prefixed else None

    # ------------------------------------------------------------------ while they run

    def _watch(self, inbox: Inbox) -> None:
        while any(replica.popen.poll() is None for replica in self._replicas) or self._died():
            self._forward(inbox)
            if self._signalled is None and self._code is None:
                self._notice_lighthouse()
                self._notice_replicas()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._kill()
                return

    def _died(self) -> bool:
        """Whether a replica must be restarted."""
        going = self._signalled is None and self._code is None
        return going and any(replica.popen.poll() != 0 and not replica.told_to_end for replica in self._replicas)

    def _forward(self, inbox: Inbox) -> None:
        for number in inbox.wait(_TICK_S):
            if number not in ENDING:
                self._signal_all(number)
            elif self._signalled is not None:
                # The second signal ends the run at once.
                self._kill()
            else:
                self._signalled = number
                self._deadline = time.monotonic() + self._plan.grace_period
                self._signal_all(signal.SIGTERM if number == signal.SIGINT else number)

    def _signal_all(self, number: int) -> None:
        for replica in self._replicas:
            if replica.popen.poll() is None:
                replica.signal(number)

    def _notice_lighthouse(self) -> None:
        """End the run when the lighthouse has died, because no replica can begin another step."""
        code = None if self._lighthouse is None else self._lighthouse.poll()
        if code is not None:
            self._end(1, f"The lighthouse {ending(code)}; the run ends.")
            self._error = LaunchError(
                "Cannot continue a run of replicas without its lighthouse.",
                f"It {ending(code)}, and no replica can begin another step without it.",
                "Start the run again; replicas that save checkpoints continue from the newest ones.",
            )

    def _notice_replicas(self) -> None:
        ended = [replica for replica in self._replicas if replica.popen.poll() == 0]
        finished, left = bool(ended), min((replica.left_at or time.time() for replica in ended), default=0.0)
        for replica in self._replicas:
            code = replica.popen.poll()
            if replica.died_at is not None and replica.joined_at is not None:
                self._say(f"Replica {replica.number} rejoined, {time.monotonic() - replica.died_at:.0f} s later.")
                replica.died_at = None
            if code is None:
                if finished and (replica.joined_at or left) >= left and not replica.told_to_end:
                    replica.told_to_end = True
                    replica.signal(signal.SIGTERM)
            elif code != 0 and not finished:
                self._replace(replica, shell_code(code))
                if self._code is not None:
                    return
            elif code != 0 and not replica.told_to_end:
                replica.told_to_end = True
                self._say(f"Replica {replica.number} {ending(code)} when others had finished; it is not restarted.")

    def _replace(self, replica: _Replica, code: int) -> None:
        """Restart a replica that died, or end the run."""
        number = replica.number
        replica.fruitless = 0 if replica.joined_at is not None else replica.fruitless + 1
        died = ending(128 - code if code > 128 else code)
        if code != RESUME and code <= 128:
            why = f"Replica {number} {died}. The run ends, because all replicas would raise the script's error."
            self._end(code, f"{why} {_RESTARTED_EXPLANATION if replica.restarted else ''}".rstrip())
        elif self._restarts >= self._config.restarts:
            self._end(
                code,
                f"Replica {number} {died}. The run ends, because it has used its {self._config.restarts} restarts.",
            )
        elif replica.fruitless >= _MAX_FRUITLESS_DEATHS:
            often = f"it died {_MAX_FRUITLESS_DEATHS} times in a row before it made a step"
            self._end(code, f"Replica {number} {died}. The run ends: {often}.")
        else:
            self._restarts += 1
            if replica.relay is not None:
                replica.relay.finish(_OUTPUT_TIMEOUT_S)
            restart = f"restart {self._restarts} of {self._config.restarts}"
            self._say(f"Replica {number} {died}. It is restarted ({restart}).")
            replica.restarted, replica.died_at = True, time.monotonic()
            replica.popen, replica.joined, replica.relay = self._start(number, again=True)
            replica.told_to_end = False

    def _end(self, code: int, why: str) -> None:
        """Request all remaining processes to end."""
        self._code = code
        self._say(why)
        self._deadline = time.monotonic() + self._plan.grace_period
        self._signal_all(signal.SIGTERM)

    def _kill(self) -> None:
        """Kill all remaining processes."""
        for replica in self._replicas:
            if replica.popen.poll() is None:
                replica.signal(signal.SIGKILL)
            replica.popen.wait()
        if self._lighthouse is not None:
            if self._lighthouse.poll() is None:
                self._lighthouse.terminate()
            try:
                self._lighthouse.wait(_OUTPUT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._lighthouse.kill()
                self._lighthouse.wait()
            if self._lighthouse.stdout is not None:
                self._lighthouse.stdout.close()

    def _say(self, text: str) -> None:
        if not self._plan.quiet:
            print(f"accel launch: {text}", file=sys.stderr, flush=True)
