"""Completion with the Tab key, in a real bash."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from accel_cli.command import BUILT_IN
from accel_cli.launch.interface import AUTO
from accel_cli.launch.launchers import LAUNCHERS

pytest.importorskip("argcomplete", reason="completion needs the extra accel-cli[completion]")

# What readline does when the Tab key is pressed at the end of the line; 9 is its number of the key.
PRESS = """
eval "$(accel completion bash)"
COMP_LINE={line}; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_TYPE=9
_python_argcomplete accel
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def press_tab(tmp_path):
    """What bash would offer at the end of a line."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    command = tmp_path / "bin" / "accel"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m accel_cli.main "$@"\n')
    command.chmod(0o755)
    path = {"PATH": f"{command.parent}:{os.environ['PATH']}"}

    def press(line):
        words = line.split(" ")
        program = PRESS.format(line=shlex.quote(line), words=" ".join(map(shlex.quote, words)))
        finished = subprocess.run(
            [bash, "-c", program], capture_output=True, text=True, timeout=250, cwd=tmp_path, env={**os.environ, **path}
        )
        return sorted(word.strip() for word in finished.stdout.split())

    return press


def test_completion_offers_commands(press_tab):
    assert set(press_tab("accel ")) >= {name for name, _, _ in BUILT_IN}
    assert press_tab("accel exp") == ["explain"]


def test_options_of_the_command_on_the_line(press_tab):
    offered = press_tab("accel launch --num_p")
    assert offered == ["--num_processes"]
    assert press_tab("accel env --li") == ["--light"]


def test_choices_of_an_option(press_tab):
    assert press_tab("accel launch --mixed_precision b") == ["bf16"]
    assert press_tab("accel launch --launcher ") == sorted((AUTO, *LAUNCHERS.names()))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_lines_for_every_shell(accel, shell):
    finished = accel("completion", shell)
    assert finished.returncode == 0
    assert "accel" in finished.stdout


def test_an_unknown_shell(accel):
    finished = accel("completion", "cmd")
    assert finished.returncode == 2
    assert "invalid choice: 'cmd'" in finished.stderr


def test_without_the_library_the_install_line_is_shown():
    program = (
        "import sys; sys.modules['argcomplete'] = None\nfrom accel_cli.main import main\n"
        "sys.exit(main(['completion', 'bash']))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert finished.returncode == 2
    assert 'Run: pip install "argcomplete"' in finished.stderr
