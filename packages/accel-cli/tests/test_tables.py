"""Tables in a terminal and elsewhere."""

from __future__ import annotations

import pytest

from accel_cli.terminal import coloured, columns


def test_plain_columns():
    assert columns(["a", "b"], [["longer", 1], ["x", None]]) == ["a       b", "longer  1", "x       None"]
    assert columns(["a", "b"], []) == ["a  b"]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_processes: 2\nmain_process_ip: '[b]x'\n")
    return path


def test_markup_of_a_file_is_text(terminal, config, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    code, shown = terminal("explain", "--config_file", config).end()
    assert code == 0
    assert "[b]x" in shown


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1", "TERM": "xterm-256color"}, {"TERM": "dumb"}])
def test_no_colours_where_none_are_wanted(terminal, config, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, shown = terminal("explain", "--config_file", config).end()
    assert code == 0
    assert "\x1b[3" not in shown
    assert "num_processes" in shown


def test_a_program_that_reads_gets_plain_text(accel, config):
    done = accel("explain", "--config_file", config, env={"FORCE_COLOR": "1"})
    assert "\x1b" not in done.stdout


def test_states_have_colours_in_a_terminal(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    code, shown = terminal("backends", "--no_probe").end()
    assert code == 0
    assert "\x1b[33munknown" in shown


def test_a_state_is_plain_text_elsewhere():
    assert coloured("ok") == "ok"
    assert columns(["name", "state"], [["a", "good"]], "state") == ["name  state", "a     good"]
