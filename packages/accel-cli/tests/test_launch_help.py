"""The help text of `accel launch`."""

from __future__ import annotations

import shutil

from accel_cli.commands.launch import Launch
from accel_cli.launch.backends import switches
from accel_cli.launch.options import ESSENTIAL
from accel_cli.parser import Parser


def test_a_backend_that_is_installed_later_is_in_it(accel, tmp_path):
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


def test_the_short_text_shows_what_most_runs_need_and_names_the_whole_one(accel):
    short, whole = accel("launch", "--help").stdout, accel("launch", "--help-all").stdout
    flags = [[word.strip(",`") for word in text.split() if word.startswith("--")] for text in (short, whole)]
    assert {*ESSENTIAL, *(f"--{name}" for name in switches())} <= set(flags[0]) < set(flags[1])
    assert "`accel launch --help-all` shows every option" in short
    assert accel("launch", "--num_processes", "2", "--help").stdout == short
    assert {"--slurm_option", "--fsdp_version", "--rdzv_conf"} <= set(flags[1])


def test_the_drop_in_shows_every_option():
    parser = Parser("accelerate launch")
    Launch().add_arguments(parser)
    assert {"--slurm_option", "--fsdp_version", "--rdzv_conf"} <= set(parser.format_help().split())


def test_options_without_effect_are_taken_and_not_shown(accel, script):
    finished = accel("launch", "--same_network", "--cpu", script("print('ran')"))
    assert finished.stdout == "ran\n", finished.stderr
    assert "same_network" not in accel("launch", "--help-all").stdout
