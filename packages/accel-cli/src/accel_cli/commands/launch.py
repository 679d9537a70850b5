"""`accel launch`: start a script on one or many processes."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final, NoReturn

from accel_state.settings.environ import LAUNCH_RECORD

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from accel_cli.launch.interface import Launcher, LaunchPlan, LaunchRequest

__all__ = ("COMMAND", "Launch", "launch_record")

# Code that starts processes is imported where it is needed, so that help texts and errors appear quickly.
_PROG: Final = "accel launch"


class Launch:
    """Reads the options, prepares the launch and starts the script."""

    help = "start a script on one or many processes"
    examples = ("--num_processes 2 train.py", "--config_file cluster.yaml train.py")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the flags of the settings of the launchers and backends, then the script and its arguments.

        Under the name of the drop-in, the help text shows every option, and an allocation selects no launcher: the
        original starts processes on this machine.
        """
        from accel_cli.launch.options import add_launch_arguments

        add_launch_arguments(parser, everything=parser.prog != _PROG)
        parser.set_defaults(prog=parser.prog)

    def run(self, arguments: Namespace) -> int:
        """Start the processes and return the exit code of the run."""
        if arguments.help_all:
            from accel_cli.launch.options import add_launch_arguments
            from accel_cli.parser import Parser

            parser = Parser(arguments.prog, f"{self.help[:1].upper()}{self.help[1:]}.")
            add_launch_arguments(parser, everything=True)
            parser.print_help()
            return 0
        launcher, plan = self._planned(arguments)
        return _become(plan) if plan.replaces and os.name == "posix" else launcher.run(plan)

    def _planned(self, arguments: Namespace) -> tuple[Launcher, LaunchPlan]:
        """The launcher of a launch and its plan."""
        from accel_cli.launch.launchers import load_launcher
        from accel_cli.launch.request import check_backend, check_plan, check_request, read_request
        from accel_cli.launch.script import check_script

        request = read_request(arguments, os.environ, allocations=arguments.prog == _PROG)
        check_script(request.script)
        check_backend(request)
        check_request(request)
        if request.settings["preflight"].value and not request.launcher.elsewhere:
            from accel_cli.doctor.nodes import clear_for_launch

            clear_for_launch(request)
        launcher = load_launcher(request.launcher)
        plan = launcher.plan(request)
        check_plan(request, plan)
        plan = plan._replace(environment={**plan.environment, LAUNCH_RECORD: launch_record(request)})
        if not request.quiet:
            from accel_cli.launch.notes import first_line, notes
            from accel_state.untrusted import printable

            for note in (first_line(request, plan), *notes(request, plan)):
                print(printable(f"accel launch: {note}", keep="\n\t"), file=sys.stderr, flush=True)
        return launcher, plan


def launch_record(request: LaunchRequest) -> str:
    """What the main process writes into the record of the run: the command, and each setting that has a value."""
    import json

    from accel_cli.launch.request import idle_options

    script, idle = request.script, idle_options(request)
    values = {
        name: [setting.value, setting.origin]
        for name, setting in request.settings.items()
        # The defaults of tables concern engines that this run may not use.
        if setting.value not in (None, (), "") and (setting.is_set or ("." not in name and name not in idle))
    }
    command = ["accel", "launch", *request.options, script.target, *script.arguments]
    launched = {"command": command, "folder": os.getcwd(), "launcher": request.launcher.name, "settings": values}
    return json.dumps(launched, default=str)


def _become(plan: LaunchPlan) -> NoReturn:
    """Replace this process by the one that supervises the others, so that signals and exit codes need no relay."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(plan.argv[0], plan.argv, {**plan.inherited, **plan.environment})


COMMAND: Final = Launch()
