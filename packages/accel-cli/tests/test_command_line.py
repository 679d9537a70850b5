"""`accel` itself: finding commands, help, and errors as messages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from accel_cli import main as entry
from accel_cli.command import BUILT_IN, find_command, installed_commands, spelled
from accel_state.errors import Missing, PluginError, SettingError
from accel_state.plugins import forget_plugins, plugins_of

COMMAND_MODULE = """
class Hello:
    help = "greet"
    def add_arguments(self, parser):
        parser.add_argument("--who", default="you")
    def run(self, arguments):
        print("hello", arguments.who)
        return 7
COMMAND = Hello()
"""

COMMAND_WITH_PARTS = """
class Parts:
    help = "do one of several things"
    def add_arguments(self, parser):
        part = parser.add_subparsers(required=True).add_parser("one", help="one", description="Do one of them.")
        part.add_argument("what")
    def run(self, arguments):
        print("done", arguments.what)
        return 0
COMMAND = Parts()
"""


@pytest.fixture
def offer(tmp_path, monkeypatch):
    """Make an installed distribution with a command out of two files."""
    folders = []

    def install(distribution, name, module, body):
        folder = tmp_path / distribution
        metadata = folder / f"{distribution}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "entry_points.txt").write_text(f"[accel.commands]\n{name} = {module}:COMMAND\n")
        (folder / f"{module}.py").write_text(body)
        folders.append(str(folder))
        monkeypatch.setattr(sys, "path", [*folders, *sys.path])
        monkeypatch.setenv("PYTHONPATH", ":".join(folders))
        return folder

    yield install
    forget_plugins()


def test_without_arguments_it_prints_its_help_and_fails(accel):
    finished = accel()
    assert finished.returncode == 1
    for name, _, said in BUILT_IN:
        assert f"  {name} " in finished.stdout
        assert said in " ".join(finished.stdout.split())


def test_help_is_a_success(accel):
    finished = accel("--help")
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.startswith("usage: accel <command>")


def test_accel_prints_its_version(accel):
    assert accel("--version").stdout.startswith("accel-cli 0.")


@pytest.mark.parametrize("name", [name for name, _, _ in BUILT_IN])
def test_every_command_has_a_help_text_that_needs_no_torch(name):
    program = (
        "import sys\nfrom accel_cli.main import main\n"
        f"code = main([{name!r}, '--help'])\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "sys.exit(code)"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert finished.returncode == 0, finished.stderr
    assert f"usage: accel {name}" in finished.stdout


def test_an_unknown_command_names_the_closest(accel):
    finished = accel("lunch")
    assert finished.returncode == 2
    assert finished.stderr.splitlines() == [
        "accel: Cannot run `accel lunch`.",
        f"  Installed commands: {', '.join(sorted(installed_commands()))}.",
        "  Did you mean 'launch'?",
    ]


def test_a_command_of_another_package_is_listed_and_runs_beside_one_that_cannot_be_loaded(accel, offer):
    offer("greeter", "hello", "greeter_command", COMMAND_MODULE)
    offer("grump", "sulk", "grump_command", "raise SystemExit('loaded')")
    listed = accel("--help")
    lines = {line.split()[0]: line for line in listed.stdout.splitlines() if line.startswith("  ")}
    assert lines["hello"].split() == ["hello", "greet", "(from", "greeter", "1.0)"]
    assert lines["sulk"].split() == ["sulk", "cannot", "be", "loaded", "(from", "grump", "1.0)"]
    finished = accel("hello", "--who", "world")
    assert (finished.stdout, finished.returncode) == ("hello world\n", 7)


def test_the_help_text_describes_every_command(accel):
    # Lines are broken at blanks and after hyphens.
    shown = "".join(accel("--help").stdout.split())
    others = list(plugins_of("accel.commands"))
    assert {extension.name for extension in others} >= {"estimate-memory"}
    for extension in others:
        line = f"{extension.name} {extension.load().help} (from {extension.origin})"
        assert "".join(line.split()) in shown


def test_a_command_of_another_package_may_have_parts(accel, offer):
    offer("partial", "parts", "parts_command", COMMAND_WITH_PARTS)
    assert "Do one of them." in accel("parts", "one", "--help").stdout
    finished = accel("parts", "one", "thing")
    assert (finished.stdout, finished.returncode) == ("done thing\n", 0)


def test_a_command_that_cannot_be_loaded_is_told_with_its_package(offer):
    offer("broken", "hello", "broken_command", "import no_such_module_anywhere")
    with pytest.raises(PluginError) as caught:
        find_command("hello")
    assert "broken 1.0" in caught.value.obstacle
    assert "no_such_module_anywhere" in caught.value.obstacle


def test_two_packages_with_the_same_command_are_both_named(offer):
    offer("one", "hello", "one_command", COMMAND_MODULE)
    offer("two", "hello", "two_command", COMMAND_MODULE)
    with pytest.raises(PluginError, match=r"one 1\.0, two 1\.0"):
        find_command("hello")


def test_nobody_replaces_a_command_of_this_package(offer):
    offer("thief", "launch", "thief_command", COMMAND_MODULE)
    assert type(find_command("launch")).__module__ == "accel_cli.commands.launch"


def test_an_unknown_option_names_the_closest(accel):
    finished = accel("launch", "--num_proceses", "2", "job.py")
    assert finished.returncode == 2
    assert "--num_proceses" in finished.stderr
    assert "Did you mean --num_processes?" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_an_option_of_the_script_before_its_name_is_told_its_place(accel):
    finished = accel("launch", "--lr", "0.1", "job.py")
    assert finished.returncode == 2
    assert "Options of the script follow its name: `accel launch script.py --lr`." in finished.stderr
    assert "Did you mean" not in finished.stderr


def test_typed_errors_have_no_traceback_unless_debugging(accel):
    assert "Traceback" not in accel("launch", "missing.py").stderr
    debugging = accel("launch", "missing.py", env={"ACCELERATE_DEBUG_MODE": "1"})
    assert "Traceback" in debugging.stderr


def test_an_unexpected_error_keeps_its_traceback(accel, offer):
    body = COMMAND_MODULE.replace("return 7", "raise KeyError('a bug')")
    offer("buggy", "hello", "buggy_command", body)
    finished = accel("hello")
    assert finished.returncode == 1
    assert "KeyError: 'a bug'" in finished.stderr


def test_a_reader_that_goes_away_is_no_error():
    program = [sys.executable, "-m", "accel_cli.main", "--help"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=250) in (0, 141)


def test_the_program_shows_itself_under_the_name_it_was_called_by(capsys):
    assert entry.main(["--help"], prog="accelerate") == 0
    assert capsys.readouterr().out.startswith("usage: accelerate <command>")


def test_flags_are_spelled_with_underscores_and_with_dashes():
    assert spelled("--cpu") == ("--cpu",)
    assert spelled("--main_process_ip") == ("--main_process_ip", "--main-process-ip")


@pytest.mark.parametrize("name", ["check-parity", "check-plan", "check-resume"])
def test_a_command_of_a_package_that_is_not_installed_names_the_package(name, monkeypatch):
    monkeypatch.setattr("accel_cli.command.COMMANDS.names", lambda: ("launch",))
    with pytest.raises(Missing, match="pip install accel-check"):
        find_command(name)


def test_find_command_refuses_unknown_names():
    with pytest.raises(SettingError):
        find_command("")


CLOSED = """
import os, sys
for number in map(int, sys.argv[1]):
    os.close(number)
os.execv(sys.executable, [sys.executable, "-m", "accel_cli.main", *sys.argv[2:]])
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_a_typed_error():
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "accel_cli.main", "explain"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=250, check=False)
    assert done.returncode == 2
    assert [line.strip() for line in done.stderr.splitlines()] == [
        "accel: Cannot write the output.",
        "The disk is full: [Errno 28] No space left on device.",
        "Free disk space, or write to another folder; TMPDIR selects the folder for temporary files.",
    ]
