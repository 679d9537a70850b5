"""`accel tpu-config` as the command line it runs, and `accel test` with and without the package that has its script."""

from __future__ import annotations

import os
import shlex

import pytest

from accel_cli.commands.tpu_config import pod_command
from accel_state.errors import SettingError


def test_commands_for_every_machine_of_a_pod():
    assert pod_command("mine", "us-central1-b", ["a", "b c"]) == (
        *("gcloud", "compute", "tpus", "tpu-vm", "ssh", "mine", "--zone", "us-central1-b"),
        *("--command", "cd /usr/share; a; b c", "--worker", "all"),
    )
    assert pod_command("mine", "z", ["a"], alpha=True)[:3] == ("gcloud", "alpha", "compute")


@pytest.mark.parametrize(("name", "zone", "commands"), [(None, "z", ["a"]), ("n", None, ["a"]), ("n", "z", [])])
def test_pod_command_needs_name_zone_and_commands(name, zone, commands):
    with pytest.raises(SettingError, match="not on the command line"):
        pod_command(name, zone, commands)


def shown(done):
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def test_flags_come_before_the_config_file(accel, tmp_path):
    config = tmp_path / "pod.yaml"
    config.write_text("tpu_name: mine\ntpu_zone: here\ncommands:\n  - echo one\n  - echo two\n")
    words = shown(accel("tpu-config", "--config_file", config, "--debug"))
    assert (words[5], words[7], words[9]) == ("mine", "here", "cd /usr/share; echo one; echo two")
    (tmp_path / "commands").write_text("echo three\n\necho four\n")
    flags = ("--tpu_name", "other", "--command-file", "commands", "--install_accelerate", "--accelerate_version", "1.2")
    words = shown(accel("tpu-config", "--config_file", config, *flags, "--debug"))
    assert words[5] == "other"
    assert words[9] == "cd /usr/share; pip install accel-torch==1.2; echo three; echo four"
    both = ("--command", "ls", "--command", "pwd")
    assert shown(accel("tpu-config", "--config_file", config, *both, "--debug"))[9] == "cd /usr/share; ls; pwd"


def test_gcloud_is_run_and_its_exit_code_kept(accel, tmp_path):
    words = ("tpu-config", "--tpu_name", "n", "--tpu_zone", "z", "--command", "ls")
    absent = accel(*words, env={"PATH": str(tmp_path)})
    assert (absent.returncode, "`gcloud` is not on the path" in absent.stderr) == (2, True)
    program = tmp_path / "gcloud"
    program.write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    program.chmod(0o755)
    done = accel(*words, env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    assert (done.returncode, done.stdout) == (
        7,
        "compute tpus tpu-vm ssh n --zone z --command cd /usr/share; ls --worker all\n",
    )


def test_a_file_of_commands_that_is_not_there(accel):
    done = accel("tpu-config", "--tpu_name", "n", "--tpu_zone", "z", "--command_file", "no")
    assert (done.returncode, "The file no" in done.stderr and "does not exist" in done.stderr) == (2, True)


@pytest.fixture
def installed_script(tmp_path):
    """A distribution that offers the script of `accel test`, and comes first on the path."""

    def install(body):
        site = tmp_path / "site"
        metadata = site / "tester-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "entry_points.txt").write_text("[accel.scripts]\ntest = tester.check:main\n")
        (site / "tester").mkdir()
        (site / "tester" / "__init__.py").write_text("")
        (site / "tester" / "check.py").write_text(body)
        return {"PYTHONPATH": str(site)}

    return install


def test_the_script_is_launched_as_the_file_says(accel, installed_script, tmp_path):
    env = installed_script("import os; print(os.environ['RANK'], os.environ['ACCELERATE_MIXED_PRECISION'], __name__)")
    (tmp_path / "run.yaml").write_text("num_processes: 2\nuse_cpu: true\nmixed_precision: bf16\n")
    done = accel("test", "--config_file", "run.yaml", env=env)
    assert sorted(done.stdout.splitlines()) == ["0 bf16 __main__", "1 bf16 __main__"], done.stderr
    done = accel("test", "--config_file", "run.yaml", "--", "--mixed_precision", "no", env=env)
    assert sorted(done.stdout.splitlines()) == ["0 no __main__", "1 no __main__"], done.stderr


@pytest.mark.parametrize(
    ("words", "ranks"), [((), "01"), (("--num_processes", "1"), "0"), (("--num_processes=3",), "012")]
)
def test_a_machine_without_devices_tests_two_processes_unless_a_number_is_given(accel, installed_script, words, ranks):
    env = installed_script("import os; print(os.environ.get('RANK', '0'))")
    done = accel("test", "--", "--cpu", *words, env=env)
    assert "".join(sorted(done.stdout.split())) == ranks, done.stderr


def test_checks_that_do_not_pass(accel, installed_script):
    done = accel("test", "--", "--cpu", "--num_processes", "1", env=installed_script("raise SystemExit(5)"))
    assert done.returncode == 5
    assert "accel test: the checks failed" in done.stderr


def test_without_the_script_the_install_line_is_shown(monkeypatch):
    from argparse import Namespace

    from accel_cli.commands import test as command
    from accel_state import plugins
    from accel_state.errors import Missing

    monkeypatch.setattr(plugins, "plugins_of", lambda group: ())
    with pytest.raises(Missing, match="Install accel-torch"):
        command.COMMAND.run(Namespace(config_file=None, launch=[]))
