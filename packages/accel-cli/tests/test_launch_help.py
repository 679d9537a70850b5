"""The help text of `accel launch`, which is remembered and never out of date."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from accel_cli.launch.backends import switches
from accel_cli.launch.manual import ESSENTIAL, cache_path, launch_manual


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_path(os.environ)


def test_the_text_is_the_same_the_second_time(accel, own_cache):
    first = accel("launch", "--help")
    kept = os.stat(own_cache).st_mtime_ns
    second = accel("launch", "--help")
    assert (first.returncode, second.returncode) == (0, 0)
    assert first.stdout == second.stdout
    assert "--num_processes N" in first.stdout
    assert os.stat(own_cache).st_mtime_ns == kept


def test_a_module_that_changed_makes_it_anew(accel, own_cache):
    whole = accel("launch", "--help").stdout
    with open(own_cache, encoding="utf-8") as file:
        content = json.load(file)
    content["rows"] = {}
    with open(own_cache, "w", encoding="utf-8") as file:
        json.dump(content, file)
    assert "--num_processes" not in accel("launch", "--help").stdout
    content["modules"] = {name: [mtime + 1, size] for name, (mtime, size) in content["modules"].items()}
    with open(own_cache, "w", encoding="utf-8") as file:
        json.dump(content, file)
    assert accel("launch", "--help").stdout == whole


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"modules": 3, "backends": [], "rows": {}}', '"x"'])
def test_a_file_of_somebody_else(accel, own_cache, content):
    os.makedirs(os.path.dirname(own_cache))
    with open(own_cache, "w", encoding="utf-8") as file:
        file.write(content)
    done = accel("launch", "--help")
    assert (done.returncode, "--num_processes N" in done.stdout) == (0, True), done.stderr


def test_a_folder_that_cannot_be_written(accel, tmp_path):
    (tmp_path / "file").write_text("")
    done = accel("launch", "--help", env={"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert (done.returncode, "--num_processes N" in done.stdout) == (0, True), done.stderr


def test_a_backend_that_is_installed_later_is_in_it(accel, own_cache, tmp_path):
    site = tmp_path / "site"
    metadata = site / "rocket-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "entry_points.txt").write_text("[accel.backends]\nrocket = rocket:MANIFEST\n")
    (site / "rocket.py").write_text(
        "from dataclasses import dataclass\nfrom accel_plugins.manifest import Manifest\n"
        "from accel_state.settings.schema import setting\n"
        "@dataclass\nclass Config:\n    stages: str = setting('1', flag='--rocket_stages')\n"
        "MANIFEST = Manifest('rocket', 'rocket:Config', config='rocket:Config')\n"
    )
    assert "--rocket_stages" not in accel("launch", "--help-all").stdout
    assert "--rocket_stages" in accel("launch", "--help-all", env={"PYTHONPATH": str(site)}).stdout
    # Another environment has other code of the same version.
    other = shutil.copytree(site, tmp_path / "other")
    (other / "rocket.py").write_text((site / "rocket.py").read_text().replace("--rocket_stages", "--rocket_engines"))
    assert "--rocket_engines" in accel("launch", "--help-all", env={"PYTHONPATH": str(other)}).stdout
    assert "--rocket_stages" not in accel("launch", "--help-all").stdout


def test_the_short_text_shows_what_most_runs_need_and_names_the_whole_one(accel, own_cache):
    short, whole = accel("launch", "--help").stdout, accel("launch", "--help-all").stdout
    flags = [[word.strip(",`") for word in text.split() if word.startswith("--")] for text in (short, whole)]
    assert {*ESSENTIAL, *(f"--{name}" for name in switches())} <= set(flags[0]) < set(flags[1])
    assert "`accel launch --help-all` shows every option" in short
    assert accel("launch", "--num_processes", "2", "--help").stdout == short
    assert {"--slurm_time", "--fsdp_version", "--rdzv_conf"} <= set(flags[1])


def test_the_drop_in_shows_every_option(monkeypatch, own_cache):
    assert {"--slurm_time", "--fsdp_version", "--rdzv_conf"} <= set(launch_manual("accelerate launch").split())
