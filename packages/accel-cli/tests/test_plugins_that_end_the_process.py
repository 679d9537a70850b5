"""Plugins whose import ends the process, prints, or has a name for a terminal: commands list them, and go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accel_cli.main import main
from accel_state.errors import AccelError

pytestmark = pytest.mark.usefixtures("preloaded_python")

ESCAPE = "\x1b[2Jgone"

BODIES = {"exits": "import sys\nsys.exit(7)", "escapes": f"raise ImportError({ESCAPE!r})"}
"""What the module of a plugin does when it is imported."""

REASONS = {
    "exits": "ImportError: Its code tried to end this process with: sys.exit(7)",
    "escapes": r"ImportError: \x1b[2Jgone",
}

GROUPS = ("backends", "launchers", "trackers", "commands", "conversions", "checkpoint_stores", "memory", "devices")


def install(folder: Path, name: str, body: str, groups: tuple[str, ...] = GROUPS) -> None:
    """A package with a plugin in every group."""
    (folder / f"{name}_plugin.py").write_text(body, encoding="utf-8")
    info = folder / f"{name}_plugin-1.0.dist-info"
    info.mkdir()
    lines = [line for group in groups for line in (f"[accel.{group}]", f"{name} = {name}_plugin:PLUGIN")]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture(params=list(BODIES))
def plugin(request, tmp_path):
    """The name of an installed plugin."""
    install(tmp_path, request.param, BODIES[request.param])
    return request.param


def test_commands_list_it_as_broken(accel, tmp_path, plugin):
    env = {"PYTHONPATH": str(tmp_path)}
    listed = accel("backends", "--no_probe", env=env)
    assert listed.returncode == 0, listed.stderr
    assert f"cannot be used: {REASONS[plugin]}" in listed.stdout
    assert "\x1b" not in listed.stdout + listed.stderr
    rows = {row["name"]: row for row in json.loads(accel("backends", "--no_probe", "--json", env=env).stdout)}
    assert rows[plugin]["obstacle"] == REASONS[plugin]
    examined = accel("doctor", "--json", env=env)
    broken = [one for one in json.loads(examined.stdout) if one["message"].startswith(plugin)]
    assert {one["subject"] for one in broken} == set(GROUPS)
    assert all(one["verdict"] == "warning" for one in broken)


def test_a_launch_goes_on_without_it(accel, script, tmp_path, plugin):
    finished = accel("launch", "--cpu", script("print('ran')"), env={"PYTHONPATH": str(tmp_path)})
    assert (finished.returncode, finished.stdout) == (0, "ran\n"), finished.stderr
    chosen = accel("launch", "--launcher", plugin, script("print('ran')"), env={"PYTHONPATH": str(tmp_path)})
    assert (chosen.returncode, chosen.stdout) == (2, "")
    assert f"{plugin}_plugin:PLUGIN of {plugin}-plugin 1.0 could not be loaded: {REASONS[plugin]}" in chosen.stderr


def test_the_command_that_it_would_be_says_why(accel, tmp_path, plugin):
    finished = accel(plugin, env={"PYTHONPATH": str(tmp_path)})
    assert (finished.returncode, finished.stdout) == (2, "")
    assert REASONS[plugin] in finished.stderr
    assert "\x1b" not in finished.stderr


@pytest.mark.parametrize(
    "command", [["--help"], ["env", "--light", "--json"], ["explain", "--json"], ["launch", "--help"]]
)
def test_other_commands_work(accel, tmp_path, plugin, command):
    finished = accel(*command, env={"PYTHONPATH": str(tmp_path)})
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout
    if "--json" in command:
        json.loads(finished.stdout)


def test_the_tracker_and_the_store_that_it_would_be_are_errors(monkeypatch, tmp_path, plugin):
    from accel_plugins.checkpoint.store import open_store
    from accel_tracking.registry import tracker_class

    monkeypatch.syspath_prepend(tmp_path)
    for use in (lambda: tracker_class(plugin), lambda: open_store(f"{plugin}://bucket")):
        with pytest.raises(AccelError, match=f"{plugin}-plugin 1.0") as caught:
            use()
        assert "\x1b" not in str(caught.value)


TALKS = """
import os, subprocess, sys
print("printed", end="")
os.write(1, b"written")
subprocess.run([sys.executable, "-c", "print('by a child', end='')"])
PLUGIN = None
"""


@pytest.mark.parametrize("command", [["backends", "--no_probe"], ["backends"], ["doctor"], ["env"], ["explain"]])
def test_what_it_writes_is_not_in_the_output(accel, tmp_path, command):
    install(tmp_path, "talks", TALKS)
    finished = accel(*command, "--json", env={"PYTHONPATH": str(tmp_path)})
    json.loads(finished.stdout)
    if command[0] == "backends":
        assert all(text in finished.stderr for text in ("printed", "written", "by a child"))


def test_its_name_is_escaped_in_every_list(accel, tmp_path):
    (tmp_path / "bad-1.0.dist-info").mkdir()
    lines = [line for group in GROUPS for line in (f"[accel.{group}]", f"a{ESCAPE} = no_such_module:PLUGIN")]
    (tmp_path / "bad-1.0.dist-info" / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    for command in (["backends", "--no_probe"], ["env", "--light"], ["doctor"], ["--help"], ["launch", "--help-all"]):
        finished = accel(*command, env={"PYTHONPATH": str(tmp_path)})
        assert "\x1b" not in finished.stdout + finished.stderr, command
    assert r"a\x1b[2Jgone" in accel("backends", "--no_probe", env={"PYTHONPATH": str(tmp_path)}).stdout


def test_an_interrupt_by_the_user_still_ends_the_command(tmp_path):
    body = "import os, sys, time\nos.write(2, b'importing\\n')\nwhile True:\n    time.sleep(0.05)"
    install(tmp_path, "slow", body, ("backends",))
    process = subprocess.Popen(
        [sys.executable, "-m", "accel_cli.main", "backends", "--no_probe"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_a_name_that_a_user_types_is_escaped(capsys):
    assert main([ESCAPE]) == 2
    assert "\x1b" not in capsys.readouterr().err
