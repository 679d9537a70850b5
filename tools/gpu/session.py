"""Run everything that needs a GPU, within minutes, and write a report.

    python3 tools/gpu/session.py [--list] [--nproc N] [--minutes M] [--report FILE] [-k WORDS]

Where the torch of this Python finds no GPU, and that of the machine's `python3` does, that one runs it. The session
needs torch and pytest there, installs nothing, and writes nothing into the checkout but the report. Tests run in one
process, the most important first. After a test that hangs, dies or leaves the device unusable, the others
continue in a new process. Tests that do not fit into the time are reported as not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from checkout import ROOT, declared_modules, write_metadata  # type: ignore[import-not-found, unused-ignore]
from report import write_report  # type: ignore[import-not-found, unused-ignore]

ORDER = (
    "test_copies_on_devices",
    "test_collectives_on_devices",
    "test_training_on_devices",
    "test_offload_on_devices",
    "test_snapshots_on_devices",
    "test_memory_on_devices",
    "test_micro_batches",
    "test_synchronisations_of_a_step",
    "test_cost_of_judged_steps",
    "test_generators_on_devices",
    "test_pinned_loading_on_devices",
    "test_checkpoints_of_devices",
    "test_backends_conform_on_devices",
    "test_float8_on_devices",
    "test_tensor_parallel_on_gpus",
    "test_cuda_family",
    "test_compile_on_devices",
    "test_collectives_between_gpus",
)
"""Modules of tests, the most important first and the long ones late."""

LONGEST = 150.0
"""Seconds that one test may take; compiling for the first time takes most."""

STARTING = 120.0
"""Seconds until the first test begins: torch and the modules of tests are imported."""

RESERVE = 8.0
"""Seconds that are kept for ending processes and writing the report."""

PROBE = """
import importlib.util, json, platform, shutil, subprocess, sys
facts = {"python": platform.python_version(), "executable": sys.executable, "missing": []}
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is None:
        facts["missing"].append(name)
if "torch" not in facts["missing"]:
    import torch
    facts["torch"], facts["cuda"] = torch.__version__, torch.version.cuda
    facts["available"] = torch.cuda.is_available()
    if facts["available"]:
        count = torch.cuda.device_count()
        facts["devices"] = [torch.cuda.get_device_name(index) for index in range(count)]
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        facts["memory"] = torch.cuda.mem_get_info()[1]
        try:
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        except Exception as error:
            facts["nccl"] = f"none ({error})"
facts["compiler"] = shutil.which("cc") or shutil.which("gcc")
try:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    facts["driver"] = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.split("\\n")[0].strip()
except Exception:
    facts["driver"] = ""
print(json.dumps(facts))
"""


@dataclass
class Session:
    """What is being run.

    Args:
        options: those of the command line.
        folder: for everything that is written on the way.
        deadline: when the last test has to have ended, by `time.monotonic`.

    Attributes:
        tests: the tests that were found, in order.
        results: the outcome of each.
        troubles: what happened beside the tests, such as modules that cannot be imported.
    """

    options: argparse.Namespace
    folder: Path
    deadline: float
    tests: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    troubles: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        paths = [*write_metadata(self.folder / "metadata"), str(Path(__file__).parent)]
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")},
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "GPU_SESSION_ID": self.mark,
            "GPU_SESSION_DEVICE": self.options.device,
            "GPU_PROCESSES": str(self.options.nproc),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
            # All processes are on this machine, which may have no other network.
            "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        }

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    # ---------------------------------------------------------------- running

    def run(self, after_each: Any, only_list: bool = False) -> None:
        """Find the tests and run them until the deadline; a process that ends early is followed by another.

        Args:
            after_each: called whenever more is known.
            only_list: find them, and run none.
        """
        number, files = 0, self._files()
        while files and self.left() > 1:
            number, before = number + 1, len(self.results)
            self._run_some(number, files, only_list, after_each)
            if not self.tests:
                self.troubles.append({"test": "collecting", "text": self._log(number)})
            elif len(self.results) == before and not only_list:
                # A process that ran no test would end the same way again.
                self.troubles.append({"test": "running", "text": self._log(number)})
            if only_list or len(self.results) == before:
                return
            remaining = (test["test"].partition("::")[0] for test in self.tests if test["test"] not in self.results)
            files = [str(ROOT / name) for name in dict.fromkeys(remaining)]

    def _run_some(self, number: int, files: list[str], only_list: bool, after_each: Any) -> None:
        orders = {"only_list": only_list, "done": list(self.results), "order": ORDER, "words": self.options.k.split()}
        events, position = self.folder / f"run{number}.events", 0
        process = self._pytest(events, files, {**orders, "several": self.options.nproc > 1})
        current, begun = "", time.monotonic()
        while True:
            ended = process.poll() is not None
            new, position = _read(events, position)
            for event in new:
                current, begun = self._note(event, current, begun)
            if new:
                after_each()
            late = time.monotonic() - begun > (LONGEST if current else STARTING)
            if ended or late or self.left() <= 0:
                break
            time.sleep(0.1)
        self._end(process)
        if current:
            out = self.left() <= 0
            what = "not run" if out else "hung" if late and not ended else f"died (exit code {process.returncode})"
            text = "time was up while it ran" if out else self._log(number)
            seconds = round(time.monotonic() - begun, 2)
            self.results[current] = {"outcome": what, "seconds": seconds, "text": text}
        after_each()

    def _note(self, event: dict[str, Any], current: str, begun: float) -> tuple[str, float]:
        """Take in one event; the test that runs now, and since when."""
        if event["event"] == "found":
            if event["test"] not in [test["test"] for test in self.tests]:
                self.tests.append(event)
            return current, begun
        if event["event"] == "start":
            return event["test"], time.monotonic()
        if event["event"] == "end":
            self.results[event["test"]] = {key: event[key] for key in ("outcome", "seconds", "text")}
            print(f"{event['outcome']:>8} {event['seconds']:7.1f} s  {event['test']}", flush=True)
            return "", time.monotonic()
        self.troubles.append(event)
        return current, begun

    def _files(self) -> list[str]:
        """Modules that have tests for devices; others are not imported, so that they can miss what they want."""
        found = [*ROOT.glob("packages/*/tests/test_*.py"), *ROOT.glob("tests-integration/test_*.py")]
        texts = {path: path.read_text(encoding="utf-8") for path in sorted(found)}
        return [str(path) for path, text in texts.items() if "mark.cuda(differs" in text or "@on_devices(" in text]

    # ---------------------------------------------------------------- processes

    def _pytest(self, events: Path, files: list[str], orders: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Start pytest; its settings are its own, because those of the repository name plugins that may be missing."""
        settings = self.folder / "pytest.ini"
        settings.write_text("[pytest]\nmarkers =\n    slow: takes more than ten seconds\n", encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-c", str(settings), "--rootdir", str(ROOT), "-q"]
        command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "accel_testing.plugin"]
        command += ["-p", "session_recorder", "--basetemp", str(self.folder / f"tests-{events.stem}"), *files]
        environment = {
            **self.environment,
            "GPU_SESSION_EVENTS": str(events),
            "GPU_SESSION_ORDERS": json.dumps(orders),
        }
        with open(self.folder / f"{events.stem}.log", "wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def _log(self, number: int) -> str:
        """The end of what a process printed."""
        return (self.folder / f"run{number}.log").read_text(encoding="utf-8", errors="replace")[-4000:]

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End a process and all that it started, which hold memory of the device and have the mark of this session."""
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for found in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"GPU_SESSION_ID={self.mark}".encode() in found.read_bytes():
                    os.kill(int(found.parent.name), signal.SIGKILL)


def _read(path: Path, position: int) -> tuple[list[dict[str, Any]], int]:
    """The events since a position, complete lines only."""
    if not path.exists():
        return [], position
    with path.open("rb") as file:
        file.seek(position)
        text = file.read()
    complete = text.rpartition(b"\n")[0]
    return [json.loads(line) for line in complete.splitlines()], position + len(complete) + bool(complete)


def probe() -> dict[str, Any]:
    """What this Python and this machine have; asked in a process of its own, which leaves the device alone."""
    command = [sys.executable, "-c", PROBE, *declared_modules()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{sys.executable} cannot say what it has:\n{done.stderr}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def go_on_with_cuda(facts: dict[str, Any]) -> None:
    """Continue in the machine's own Python, if its torch finds a GPU and that of this one does not."""
    if facts.get("available") or os.environ.get("GPU_SESSION_MOVED"):
        return
    own = Path(sys.executable).parent
    path = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if Path(folder) != own]
    python = shutil.which("python3", path=os.pathsep.join(path))
    script = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if python and subprocess.run([python, "-c", script], capture_output=True, check=False).returncode == 0:
        os.environ["GPU_SESSION_MOVED"] = "1"
        os.execv(python, [python, *sys.argv])


def obstacle(facts: dict[str, Any], options: argparse.Namespace) -> str:
    """One sentence about why nothing can be run, or nothing."""
    absent = [name for name in ("torch", "pytest") if name in facts["missing"]]
    if absent:
        return f"{facts['executable']} has no {' and no '.join(absent)}, so nothing was run."
    if options.device != "cuda":
        return ""
    if not facts["available"]:
        built = f"built for CUDA {facts['cuda']}" if facts["cuda"] else "built without CUDA"
        return f"torch {facts['torch']} of {facts['executable']} ({built}) finds no GPU, so nothing was run."
    if len(facts["devices"]) < options.nproc:
        return f"--nproc {options.nproc} needs as many GPUs, and there are {len(facts['devices'])}, so nothing was run."
    return ""


def show(tests: list[dict[str, Any]]) -> None:
    """Print what would be run, and what each of it is for."""
    for test in tests:
        print(f"{test['test']}\n    {test['differs']}")
    print(f"\n{len(tests)} tests")


def report_path(asked: str | None) -> Path:
    """Where the report goes; a temporary folder where the current one cannot be written."""
    path = Path(asked or "gpu-report.md").resolve()
    return path if os.access(path.parent, os.W_OK) else Path(tempfile.gettempdir()) / path.name


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run everything that needs a GPU, and write a report.")
    parser.add_argument("--list", action="store_true", help="show what would be run, and run nothing")
    parser.add_argument("--nproc", type=int, default=1, help="GPUs to use: one process each, over NCCL")
    parser.add_argument("--minutes", type=float, default=9.0, help="when the session has ended in any case")
    parser.add_argument("--report", help="file to write; gpu-report.md in the current folder")
    parser.add_argument("-k", default="", help="words that the names of tests have to contain")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu", "simulated"), help="try the session itself without a GPU"
    )
    return parser.parse_args(arguments)


def main() -> int:
    """Run the session; the exit code is 1 when a test failed, hung or died, or when there is nothing to run it with."""
    begun = time.monotonic()
    options = read_options()
    facts = probe()
    if options.device == "cuda":
        go_on_with_cuda(facts)
    reason = obstacle(facts, options)
    if {"torch", "pytest"} & set(facts["missing"]):
        print(reason)
        return 1
    with tempfile.TemporaryDirectory(prefix="gpu-session-", ignore_cleanup_errors=True) as folder:
        session = Session(options, Path(folder), begun + options.minutes * 60 - RESERVE)
        if reason or options.list:
            session.run(lambda: None, only_list=True)
            show(session.tests)
            print(reason or f"torch {facts['torch']} of {facts['executable']} would run them.")
            return 0
        path = report_path(options.report)

        def write() -> None:
            write_report(path, facts, session, time.monotonic() - begun)

        write()
        session.run(write)
        write()
        print(f"{path.read_text(encoding='utf-8').partition('## ')[0]}\nThe report: {path}")
        bad = {"failed", "hung"}
        broken = [one for one in session.results.values() if one["outcome"] in bad or one["outcome"].startswith("died")]
        return 1 if broken or session.troubles or not session.tests else 0


if __name__ == "__main__":
    sys.exit(main())
