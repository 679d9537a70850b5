"""Starting: imports, commands, and launches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Final

from bench.case import Call, Case, Scope, Work
from bench.metering import paused

IMPORTS: Final = (
    "Imports: CPU time to import and create an Accelerator, in a fresh process that has imported torch. The objects of "
    "torch are frozen first (`gc.freeze`): otherwise the figure depends on whether a full garbage collection happens "
    "during the import."
)
OVER_TORCH: Final = "Import of one package: what it adds to the import of torch."
DROP_IN: Final = 'Import of accelerate: CPU time of a process that imports only the drop-in; "raw" imports accel_torch.'
COMMANDS: Final = (
    'Commands: CPU time; "raw" is `python -c pass`. The original has neither `explain` nor `env --light`: they are '
    "compared with its `--help` and its `env`."
)
RESTARTS: Final = (
    'Restarts: wall time from the SIGKILL of a process to the next step; "raw" is a launch to its first step.'
)
LAUNCHES: Final = 'Launches: wall time from a launch to the first line of its script; "raw" is torchrun.'

EIGHT: Final = """
from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch, notebook_launcher
from accelerate import skip_first_batches
from accelerate.utils import DistributedType, gather, send_to_device, set_seed
Accelerator(cpu=True)
"""

CONFIG: Final = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: true
"""


# ---------------------------------------------------------------- what imports take
def statements(text: str, scope: Scope) -> Call:
    """Runs statements that import, where torch is imported already."""
    import gc

    import torch  # noqa: F401 - what it takes does not count

    code = compile(text, "<statements>", "exec")
    gc.collect()
    gc.freeze()
    return lambda: exec(code, {})


def making(module: str) -> str:
    """Statements that make an Accelerator."""
    return f"from {module} import Accelerator\nAccelerator()"


def imports(name: str, ours: str, peer: str, limit: float) -> tuple[Case, Case]:
    """What imports take, and how many modules they load."""
    work = Work(partial(statements, ours), partial(statements, peer), once=True)
    case = partial(Case, "startup", name, figure="ours/peer", work=work, method=IMPORTS)
    return case(unit="CPU ms", limit=limit), case(unit="modules", limit=None)


def import_of(module: str) -> tuple[Case, Case]:
    """What the import of one package takes, and how many modules it loads."""
    work = Work(partial(statements, f"import {module}"), once=True)
    case = partial(Case, "startup", f"import {module}", figure="ours", limit=None, work=work, method=OVER_TORCH)
    return case(unit="CPU ms"), case(unit="modules")


# ---------------------------------------------------------------- commands
def command(*arguments: str) -> Call:
    """A process that is waited for."""
    return lambda: subprocess.run(
        arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, stdin=subprocess.DEVNULL
    )


def python(code: str, scope: Scope) -> Call:
    """A fresh interpreter that runs one line."""
    return command(sys.executable, "-c", code)


def program(scope: Scope) -> str:
    """The command line of a library; it reads no file of whoever measures."""
    os.environ["HF_HOME"] = str(scope.folder)
    return str(Path(sys.executable).parent / ("accelerate" if scope.kind == "peer" else "accel"))


def telling(arguments: tuple[str, ...], scope: Scope) -> Call:
    """A command that only tells something."""
    config = scope.folder / "run.yaml"
    config.write_text(CONFIG, encoding="utf-8")
    given = {"CONFIG": str(config)}
    return command(program(scope), *(given.get(argument, argument) for argument in arguments))


def tells(ours: tuple[str, ...], peer: tuple[str, ...], limit: float) -> tuple[Case, Case]:
    """A command beside the original's, and beside an interpreter that does nothing."""
    work = Work(partial(telling, ours), partial(telling, peer), partial(python, "pass"))
    name = f"accel {' '.join(ours)}".replace("--config_file CONFIG", "of a file")
    case = partial(Case, "commands", name, "CPU s", work=work, method=COMMANDS)
    return case(figure="ours/peer", limit=0.1), case(figure="ours/raw", limit=limit)


# ---------------------------------------------------------------- launches
def until_first_line(arguments: tuple[str, ...], scope: Scope) -> Call:
    """A process and all that it starts, until one of them prints something."""

    def run() -> None:
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            with paused():
                process.communicate()
        if process.returncode != 0 or not first:
            raise SystemExit(f"{' '.join(arguments)} ended with exit code {process.returncode}.")

    return run


def script(scope: Scope) -> str:
    """A script that prints a line."""
    path = scope.folder / "job.py"
    path.write_text("import os\nos.write(1, b'begun\\n')\n", encoding="utf-8")
    return str(path)


def launch(options: tuple[str, ...], scope: Scope) -> Call:
    """A launch by a library."""
    return until_first_line((program(scope), "launch", *options, script(scope)), scope)


def torchrun(scope: Scope) -> Call:
    """A launch by torch, as a script that joins a group needs it: with a static port of 0 none would meet another."""
    arguments = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    return until_first_line((sys.executable, *arguments, script(scope)), scope)


def launched(name: str, figure: str, limit: float, work: Work) -> Case:
    """A case of a launch."""
    return Case("commands", name, "wall s", figure, limit, work, LAUNCHES)


TRAINS: Final = """
import os
import time
import torch
from {library} import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
os.write(1, f"{{os.getpid()}} {{accelerator.process_index}}\\n".encode())
while os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and {waits}:
    time.sleep(0.05)
"""
"""Makes one step, says so, and waits to be killed unless it was started again."""


def training(waits: bool, scope: Scope) -> str:
    """The script of the cases of restarts."""
    path = scope.folder / f"train_{waits}.py"
    library = "accelerate" if scope.kind == "peer" else "accel_torch"
    path.write_text(TRAINS.format(library=library, waits=waits), encoding="utf-8")
    return str(path)


def restarted(options: tuple[str, ...], scope: Scope) -> Call:
    """From the end of one of two processes by SIGKILL to the first step after their restart."""
    arguments = (program(scope), "launch", *TWO, *options, training(True, scope))

    def run() -> None:
        with paused():
            process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert process.stdout is not None
            lines = [process.stdout.readline().split() for _ in range(2)]
        os.kill(next(int(pid) for pid, rank in lines if rank == b"1"), signal.SIGKILL)
        stepped = process.stdout.readline()
        with paused():
            process.communicate()
        if process.returncode != 0 or not stepped:
            raise SystemExit(f"{' '.join(arguments)} ended with exit code {process.returncode}.")

    return run


def first_step(options: tuple[str, ...], scope: Scope) -> Call:
    """From a launch of two processes to their first step."""
    return until_first_line((program(scope), "launch", *TWO, *options, training(False, scope)), scope)


ONE: Final = ("--num_processes", "1")
TWO: Final = ("--num_processes", "2")
ON_CPU: Final = partial(launch, ("--cpu", *ONE))
TWO_ON_CPU: Final = partial(launch, ("--cpu", *TWO))
TWO_BY_ORIGINAL: Final = partial(launch, ("--multi_gpu", *TWO))
BY_TORCHRUN: Final = partial(launch, ("--cpu", "--launcher", "torchrun", *TWO))
OF_DROP_IN: Final = Work(partial(python, "import accelerate"), raw=partial(python, "import accel_torch"))

BY_POLICY: Final = ("--cpu", "--restart_policy", "auto", "--max_restarts", "2")
BY_COUNT: Final = ("--cpu", "--max_restarts", "2")


def restarts(name: str, limit: float | None, options: tuple[str, ...]) -> Case:
    """A case of a restart, beside a fresh launch with the same options."""
    work = Work(partial(restarted, options), raw=partial(first_step, options), once=True)
    return Case("commands", name, "wall s", "ours/raw", limit, work, RESTARTS)


CASES: Final = (
    *imports("import and Accelerator()", making("accel_torch"), making("accelerate"), 0.45),
    *imports("eight old names and Accelerator()", EIGHT, EIGHT, 0.9),
    *import_of("accel_state"),
    *import_of("accel_ops"),
    Case("startup", "import accelerate", "CPU ms", "ours/raw", 1.05, OF_DROP_IN, DROP_IN),
    *tells(("--help",), ("--help",), 12.0),
    *tells(("launch", "--help"), ("launch", "--help"), 14.0),
    *tells(("explain", "--config_file", "CONFIG"), ("--help",), 14.0),
    *tells(("env", "--light"), ("env",), 4.0),
    launched("launch, one process, to its first line", "ours/peer", 0.12, Work(ON_CPU, ON_CPU)),
    launched("launch, two processes, to the first line", "ours/peer", 0.08, Work(TWO_ON_CPU, TWO_BY_ORIGINAL)),
    restarts("restart after a SIGKILL, 2 processes, to the next step", 1.3, BY_POLICY),
    restarts("restart by torchrun after a SIGKILL, 2 processes, to the next step", None, BY_COUNT),
    launched("launch through torchrun, to the first line", "ours/raw", 1.1, Work(BY_TORCHRUN, raw=torchrun)),
)
