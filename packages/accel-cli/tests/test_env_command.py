"""`accel env`: what a bug report needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from accel_cli.commands.env import describe
from accel_cli.launch.launchers import launch_classes
from accel_state.settings.schema import settings_of
from accel_testing.simulated_device import POSSIBLE


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


def with_devices(tmp_path: Path, count: int, body: str = "") -> dict[str, str]:
    """Variables with which torch finds the simulated device, registered as packages of vendors register theirs."""
    folder = tmp_path / "vendor"
    metadata_of = folder / "vendor-1.0.dist-info"
    metadata_of.mkdir(parents=True)
    (metadata_of / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
    (metadata_of / "entry_points.txt").write_text("[torch.backends]\nvendor = vendor_devices:load\n")
    (folder / "vendor_devices.py").write_text(
        "def load():\n"
        "    from accel_testing.simulated_device import DeviceModule, MODULE\n"
        f"    MODULE.plug_in({count}, 3 * 2**30)\n{body}"
    )
    return {"PYTHONPATH": str(folder)}


@pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have the simulated device here")
def test_each_device_is_named(accel, tmp_path):
    variables = with_devices(tmp_path, 2)
    devices = json.loads(accel("env", "--json", env=variables).stdout)["devices"]
    assert devices["simulated"] == 2
    assert devices["simulated:0"] == "Simulated device 0, 3.0 GiB"
    assert devices["simulated:1"] == "Simulated device 1, 3.0 GiB"
    lines = accel("doctor", env=variables).stdout.splitlines()
    assert ["ok", "simulated:1", "Simulated device 1, 3.0 GiB"] in [re.split(r" {2,}", line) for line in lines]


@pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have the simulated device here")
def test_devices_that_do_not_answer_are_said(accel, tmp_path):
    body = "    def lost(*_):\n        raise RuntimeError('lost the bus')\n    DeviceModule.get_device_name = lost\n"
    variables = with_devices(tmp_path, 1, body)
    devices = json.loads(accel("env", "--json", env=variables).stdout)["devices"]
    assert devices["simulated"] == 1
    assert devices["simulated devices"] == "did not answer: RuntimeError('lost the bus')"
    assert "The simulated devices did not answer: RuntimeError('lost the bus')" in accel("doctor", env=variables).stdout


@pytest.mark.skipif(not POSSIBLE, reason="this torch cannot have the simulated device here")
def test_devices_that_end_whoever_initialises_them_are_counted(accel, tmp_path):
    body = (
        "    def lost(*_):\n        import os, sys\n        print('bus error', file=sys.stderr, flush=True)\n"
        "        os._exit(7)\n    DeviceModule.get_device_name = lost\n"
    )
    variables = with_devices(tmp_path, 2, body)
    devices = json.loads(accel("env", "--json", env=variables).stdout)["devices"]
    assert devices["torch"].startswith(metadata.version("torch").partition("+")[0])
    assert devices["simulated"] == 2
    assert devices["devices"] == "did not answer: The query of torch failed: bus error"
    findings = json.loads(accel("doctor", "--json", env=variables).stdout)
    assert ("torch", "ok") in [(finding["subject"], finding["verdict"]) for finding in findings]
    said = {finding["message"]: finding for finding in findings if finding["subject"] == "devices"}
    assert any("2 simulated" in told for told in said)
    silent = said["The devices did not answer: The query of torch failed: bus error"]
    assert (silent["verdict"], silent["remedy"]) == ("warning", "Check their driver.")


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


def test_packages_are_those_of_the_project_and_what_they_require():
    packages = describe({}, None, light=True)["packages"]
    for name in ("accel-cli", "accel-plugins"):
        needed = {re.match("[A-Za-z0-9._-]+", line)[0] for line in metadata.requires(name) or () if "extra" not in line}
        assert {name.lower() for name in needed} <= {name.lower() for name in packages}
        assert packages[name] == metadata.version(name)
