"""`accel launch`: start a script on one or many processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from accel_cli.launch.parts import LaunchPlan, Machine, Script
    from accel_cli.launch.request import Request

__all__ = ("COMMAND", "Launch", "this_machine")

# What starts processes is imported where it is needed: a help text and an error answer without it.


class Launch:
    """The command; see `accel_cli.command.Command`."""

    help = "start a script on one or many processes"

    def manual(self, prog: str) -> str:
        """The help text."""
        from accel_cli.launch.manual import launch_manual

        return launch_manual(prog)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Flags grown from the settings of the launcher and the backends, then the script and what is its own."""
        from accel_cli.launch.options import add_launch_arguments

        add_launch_arguments(parser)

    def run(self, arguments: Namespace) -> int:
        """Start the processes and return the exit code of the run."""
        from accel_cli.doctor.preflight import clear_for_launch
        from accel_cli.launch.check import check_axes, check_here, check_launchers
        from accel_cli.launch.options import carried_classes
        from accel_cli.launch.plan import make_plan
        from accel_cli.launch.request import notes, read_request
        from accel_cli.launch.script import script_of
        from accel_state.labels import ComputeEnvironment

        script = script_of(arguments)
        request = read_request(arguments, os.environ)
        if request.settings["compute_environment"].value != ComputeEnvironment.LOCAL_MACHINE.value:
            return _hand_in(request, script)
        check_here(request.settings, python=script.how != "program")
        clear_for_launch(request)
        plan = make_plan(request.settings, script, this_machine(request.environ), carried_classes(), request.backend)
        check_launchers(request.cluster, plan.processes)
        if plan.runner in ("spawner", "torchrun"):
            check_axes(request.settings, plan.processes * request.settings["num_machines"].value)
        if not arguments.quiet:
            for note in (*notes(request), *_lost_place(plan, request.environ)):
                print(f"accel launch: {note}", file=sys.stderr, flush=True)
        if plan.runner == "torchrun":
            return _become(plan, request.environ)
        return _spawn(plan, request, arguments.quiet)


def this_machine(environ: Mapping[str, str]) -> Machine:
    """What a plan has to know about the machine this process runs on."""
    from accel_cli.launch.devices import count_devices
    from accel_cli.launch.plan import Machine

    usable = getattr(os, "sched_getaffinity", None)
    processors = len(usable(0)) if usable is not None else os.cpu_count() or 1
    return Machine(sys.executable, processors, count_devices, environ)


def _hand_in(request: Request, script: Script) -> int:
    """Let SageMaker run the script."""
    from accel_cli.launch.options import carried_classes
    from accel_cli.launch.plan import common_environment
    from accel_cli.launch.sagemaker import describe_job, hand_in

    further = request.config.additional if request.config is not None else {}
    environment = common_environment(request.settings, carried_classes())
    hand_in(describe_job(request.settings, script.target, script.arguments, environment, further))
    return 0


def _lost_place(plan: LaunchPlan, environ: Mapping[str, str]) -> list[str]:
    size = environ.get("WORLD_SIZE", "")
    if plan.runner == "torchrun" or size in ("", "1") or size == str(plan.processes):
        return []
    return [f"$WORLD_SIZE={size} is not passed on: this launch is a run of {plan.processes} process(es) by itself."]


def _spawn(plan: LaunchPlan, request: Request, quiet: bool) -> int:
    from accel_cli.launch.run import run

    return run(plan, request.environ, request.settings["main_process_port"].origin, quiet)


def _become(plan: LaunchPlan, environ: Mapping[str, str]) -> int:
    """Let the process that looks after the others take this one's place."""
    environment = {**environ, **plan.environment}
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "posix":
        os.execve(plan.argv[0], plan.argv, environment)
    import subprocess

    return subprocess.call(plan.argv, env=environment)


COMMAND: Final = Launch()
