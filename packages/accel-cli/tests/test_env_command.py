"""`accel env`: what a bug report needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata

from accel_cli.commands.env import describe
from accel_cli.distributions import requirements, versions
from accel_cli.launch.options import launch_classes
from accel_state.settings.schema import settings_of


def test_versions_are_those_of_the_installed_distributions():
    names = ["accel-state", "accel-cli", "torch", "PyYAML", "pytest", "no-such-distribution"]
    assert versions(names) == {name: metadata.version(name) for name in names[:-1]}


def test_light_leaves_out_what_only_torch_can_tell(accel):
    finished = accel("env", "--light", "--json")
    assert (finished.returncode, finished.stderr) == (0, "")
    found = json.loads(finished.stdout)
    assert list(found) == ["system", "packages", "backends", "config file", "variables"]
    assert found["system"]["python"] == sys.version.split()[0]
    assert found["packages"]["torch"] == metadata.version("torch")
    assert found["backends"]["ddp"].startswith("accel-plugins ")


def test_light_does_not_load_torch():
    program = (
        "import sys\nfrom accel_cli.main import main\nmain(['env', '--light'])\n"
        "assert not {'torch', 'numpy', 'argparse.x'} & set(sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_devices_are_asked_of_torch(accel):
    devices = json.loads(accel("env", "--json").stdout)["devices"]
    assert devices["cpu"] == 1
    assert devices["torch"].startswith(metadata.version("torch").partition("+")[0])


def test_a_broken_torch_is_said_and_does_no_harm(accel, tmp_path):
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "torch.py").write_text("raise ImportError('libcudart.so.99 is missing')")
    finished = accel("env", env={"PYTHONPATH": str(tmp_path / "shadow")})
    assert finished.returncode == 0
    assert "libcudart.so.99 is missing" in finished.stdout


def test_the_config_file_and_the_variables_are_shown(accel, tmp_path):
    folder = tmp_path / "home" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text("num_processes: 2\nfsdp_config:\n  fsdp_version: 2\n")
    variables = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCEL_API_KEY": "geheim", "MY_OWN": "private"}
    finished = accel("env", "--light", env=variables)
    lines = [line.split() for line in finished.stdout.splitlines()]
    assert ["path", str(folder / "default_config.yaml")] in lines
    assert ["fsdp_config.fsdp_version", "2"] in lines
    assert ["ACCELERATE_MIXED_PRECISION", "bf16"] in lines
    assert ["ACCEL_API_KEY", "***"] in lines
    assert "private" not in finished.stdout


def test_no_config_file_is_said(accel, tmp_path):
    assert f"{tmp_path}/home/accelerate/default_config.yaml (there is none)" in accel("env", "--light").stdout


def test_a_broken_config_file_is_shown_and_a_missing_one_refused(accel, tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1\n")
    finished = accel("env", "--light", "--config_file", broken)
    assert finished.returncode == 0
    assert "not valid YAML" in finished.stdout
    finished = accel("env", "--light", "--config-file", tmp_path / "none.yaml")
    assert finished.returncode == 2
    assert "There is no such file" in finished.stderr


def test_the_variables_of_all_settings_are_shown_without_loading_them():
    known = {known.variable for one in launch_classes() for known in settings_of(one).values() if known.variable}
    assert set(describe(dict.fromkeys(known, "1"), None, light=True)["variables"]) == known


def test_requirements_are_those_of_the_metadata():
    for name in ("accel-cli", "accel-plugins", "pytest"):
        given = {re.match("[A-Za-z0-9._-]+", line)[0] for line in metadata.requires(name) or ()}
        assert set(requirements(name)) == given
    assert requirements("no-such-distribution") == []
