"""`accel explain`: what is in effect, where it comes from, what it overrode, and how two files differ."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def files(tmp_path):
    (tmp_path / "one.yaml").write_text("num_processes: 2\nmixed_precision: fp16\nuse_cpu: true\n")
    (tmp_path / "two.yaml").write_text("num_processes: 4\nmixed_precision: fp16\n")


def explained(finished):
    assert (finished.returncode, finished.stderr) == (0, "")
    return {row["setting"]: row for row in json.loads(finished.stdout)}


def test_every_setting_tells_its_value_its_origin_and_what_it_overrode(accel, files):
    rows = explained(
        accel(
            "explain",
            "--json",
            "--config_file",
            "one.yaml",
            "--",
            "--num_processes",
            "8",
            "train.py",
            "--num_processes",
            "9",
            env={"ACCELERATE_MIXED_PRECISION": "bf16"},
        )
    )
    assert (rows["num_processes"]["value"], rows["num_processes"]["origin"]) == (8, "--num_processes")
    assert rows["num_processes"]["overrode"] == [{"value": 2, "origin": "one.yaml:1"}]
    assert rows["mixed_precision"]["origin"] == "$ACCELERATE_MIXED_PRECISION"
    assert rows["mixed_precision"]["overrode"] == [{"value": "fp16", "origin": "one.yaml:2"}]
    assert (rows["cpu"]["value"], rows["cpu"]["origin"]) == (True, "one.yaml:3")
    assert (rows["num_machines"]["value"], rows["num_machines"]["origin"]) == (1, "default")
    assert rows["cpu"]["flag"] == "--cpu"
    assert rows["cpu"]["variable"] == "ACCELERATE_USE_CPU"
    assert rows["cpu"]["key"] == "use_cpu"


def test_the_table_is_for_people(accel, files):
    finished = accel("explain", "--all", "--config_file", "one.yaml", "--", "--mixed_precision", "no")
    lines = [line.split() for line in finished.stdout.splitlines()]
    assert ["setting", "value", "from", "instead", "of"] in lines
    assert ["mixed_precision", "no", "--mixed_precision", "fp16", "(one.yaml:2)"] in lines
    assert ["main_process_ip", "-", "default"] in lines
    assert ["cpu", "true", "one.yaml:3"] in lines


def test_only_what_somebody_gave_is_shown_without_all(accel, files):
    finished = accel("explain", "--config_file", "one.yaml", "--", "--mixed_precision", "no")
    lines = finished.stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("setting"))
    assert {line.split()[0] for line in lines[start + 1 :]} == {"mixed_precision", "cpu", "num_processes"}
    assert "Every setting has its default." in accel("explain").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ["launcher: local (one machine)", "backend: selected by each process when it starts"]),
        (["--max_restarts", "2"], ["launcher: torchrun (max_restarts=2 (--max_restarts))"]),
        (["--launcher", "slurm", "--backend", "ddp"], ["launcher: slurm (launcher=slurm", "backend: ddp (--backend)"]),
        (["--use_deepspeed"], ["backend: deepspeed (--use_deepspeed)"]),
    ],
)
def test_launcher_and_backend_are_shown_with_what_chose_them(accel, words, said):
    shown = accel("explain", "--", *words, "train.py").stdout
    assert [text for text in said if text not in shown] == []


def test_a_file_named_in_the_launch_arguments(accel, files):
    rows = explained(accel("explain", "--json", "--", "--config_file", "two.yaml", "job.py"))
    assert rows["num_processes"]["origin"] == "two.yaml:1"


def test_notes_of_a_launch_are_shown(accel, tmp_path):
    folder = tmp_path / "home" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text("megatron_lm_config:\n  megatron_lm_tp_degree: 2\n")
    finished = accel("explain")
    assert f"Note: the settings of {folder / 'default_config.yaml'} are used." in finished.stdout
    assert "Note: megatron_lm_config.megatron_lm_tp_degree=2" in finished.stdout


def test_two_files_are_compared(accel, files):
    finished = accel("explain", "--config_file", "one.yaml", "--diff", "two.yaml")
    assert [line.split() for line in finished.stdout.splitlines()] == [
        ["setting", "one.yaml", "two.yaml"],
        ["cpu", "true", "(one.yaml:3)", "false", "(default)"],
        ["num_processes", "2", "(one.yaml:1)", "4", "(two.yaml:1)"],
    ]
    rows = explained(accel("explain", "--config_file", "one.yaml", "--diff", "two.yaml", "--json"))
    assert rows["num_processes"]["values"] == [2, 4]
    assert "no difference" in accel("explain", "--config_file", "one.yaml", "--diff", "one.yaml").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config_file", "none.yaml"], "There is no such file"),
        (["--config_file", "one.yaml", "--diff", "none.yaml"], "none.yaml"),
        (["--", "--num_proceses", "2"], "Did you mean --num_processes?"),
        (["--", "--num_processes", "none"], "num_processes='none'"),
        (["--jsn"], "Did you mean --json?"),
    ],
)
def test_explain_refuses_bad_arguments(accel, files, arguments, said):
    finished = accel("explain", *arguments)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert said in finished.stderr
    assert "Traceback" not in finished.stderr
