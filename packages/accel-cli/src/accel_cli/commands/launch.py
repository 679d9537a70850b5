"""`accel launch`: start a script on one or many processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from accel_cli.launch.interface import Launcher, LaunchPlan, LaunchRequest, Machine, Script
    from accel_cli.launch.request import Request

__all__ = ("COMMAND", "Launch", "launch_request", "this_machine")

# Code that starts processes is imported where it is needed, so that help texts and errors appear quickly.


class Launch:
    """The command; see `accel_cli.command.Command`."""

    help = "start a script on one or many processes"

    def manual(self, prog: str) -> str:
        """Return the help text."""
        from accel_cli.launch.manual import launch_manual

        return launch_manual(prog)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the flags of the settings of the launchers and backends, then the script and its arguments."""
        from accel_cli.launch.options import add_launch_arguments

        add_launch_arguments(parser)
        parser.add_argument("--help-all", "--help_all", action="store_true")
        parser.set_defaults(prog=parser.prog)

    def run(self, arguments: Namespace) -> int:
        """Start the processes and return the exit code of the run."""
        if getattr(arguments, "help_all", False):
            from accel_cli.launch.manual import launch_manual

            print(launch_manual(arguments.prog, everything=True), end="")
            return 0
        launcher, plan = self._planned(arguments)
        return _become(plan) if plan.replaces and os.name == "posix" else launcher.run(plan)

    def _planned(self, arguments: Namespace) -> tuple[Launcher, LaunchPlan]:
        """The request, the plan and the launcher of a launch."""
        from accel_cli.launch.check import check_axes, check_elastic, check_here, check_launch, check_launchers
        from accel_cli.launch.launchers import load_launcher
        from accel_cli.launch.request import read_request
        from accel_cli.launch.script import script_of

        script = script_of(arguments)
        request = read_request(arguments, os.environ)
        settings, manifest = request.settings, request.launcher.manifest
        if not manifest.elsewhere:
            check_here(settings, python=script.how != "program")
            if settings["preflight"].value:
                from accel_cli.doctor.nodes import clear_for_launch

                clear_for_launch(request)
            check_launch(settings)
        check_elastic(settings, manifest.name, manifest.elastic)
        launcher = load_launcher(manifest)
        plan = launcher.plan(launch_request(request, script))
        manifest.check_needs()
        check_launchers(request.cluster, plan.processes)
        if plan.world_size is not None:
            check_axes(settings, plan.world_size)
        if not arguments.quiet:
            from accel_cli.launch.notes import first_line, notes
            from accel_state.untrusted import printable

            for note in (first_line(request, plan), *notes(request), *_lost_place(plan, request.environ)):
                print(printable(f"accel launch: {note}", keep="\n\t"), file=sys.stderr, flush=True)
        return launcher, plan


def launch_request(request: Request, script: Script) -> LaunchRequest:
    """The input of the launcher's `plan`."""
    from accel_cli.launch.interface import LaunchRequest
    from accel_cli.launch.options import carried_classes, launch_options

    return LaunchRequest(
        request.settings,
        script,
        this_machine(request.environ),
        carried_classes(),
        request.backend,
        launch_options(request.arguments),
        bool(request.arguments.quiet),
        request.config.additional if request.config is not None else {},
    )


def this_machine(environ: Mapping[str, str]) -> Machine:
    """The facts about this machine that a plan needs."""
    from accel_cli.launch.devices import count_devices
    from accel_cli.launch.interface import Machine

    usable = getattr(os, "sched_getaffinity", None)
    processors = len(usable(0)) if usable is not None else os.cpu_count() or 1
    return Machine(sys.executable, processors, count_devices, environ)


def _lost_place(plan: LaunchPlan, environ: Mapping[str, str]) -> list[str]:
    foreign = [f"${name}={environ[name]}" for name in ("RANK", "WORLD_SIZE") if environ.get(name)]
    if not plan.removed or environ.get("WORLD_SIZE", "1") == "1":
        return []
    return [f"{' and '.join(foreign)} {'is' if len(foreign) == 1 else 'are'} ignored: this launch is a run of its own."]


def _become(plan: LaunchPlan) -> int:
    """Replace this process by the one that supervises the others, so that signals and exit codes need no relay."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(plan.argv[0], plan.argv, {**plan.inherited, **plan.environment})


COMMAND: Final = Launch()
