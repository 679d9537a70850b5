"""What a launch says in one line before it starts: what it starts, and what the user may not have meant."""

from __future__ import annotations

import pytest

from accel_cli.launch.launchers import load_launcher
from accel_cli.launch.notes import first_line, notes
from accel_cli.launch.request import request_of


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The first line and the notes of a launch on a machine with so many GPUs."""
    monkeypatch.setattr("accel_cli.launch.devices._DEVICE_FOLDER", str(tmp_path))

    def launch(words, devices=0, script=()):
        for number in range(devices):
            (tmp_path / f"nvidia{number}").touch()
        request = request_of(["--num_processes", "2", *words, "job.py", *script], {})
        plan = load_launcher(request.launcher).plan(request)
        return [first_line(request, plan), *notes(request)]

    return launch


@pytest.mark.parametrize(
    ("words", "devices", "line"),
    [
        (["--num_processes", "1"], 0, "1 process, device cpu, backend automatic, precision no."),
        (["--mixed_precision", "bf16"], 8, "2 processes, device accelerator, backend automatic, precision bf16."),
        (["--cpu", "--backend", "ddp"], 8, "2 processes, device cpu, backend ddp, precision no."),
        (
            ["--num_processes", "8", "--num_machines", "2", "--main_process_ip", "192.0.2.1"],
            0,
            "8 processes on 2 machines, device cpu, backend automatic, precision no.",
        ),
    ],
)
def test_the_first_line_says_what_is_started(told, words, devices, line):
    assert told(words, devices=devices)[0] == line


@pytest.mark.parametrize(
    ("words", "devices", "note"),
    [
        (["--multi_gpu"], 0, "multi_gpu=True (--multi_gpu) has no effect: this machine has no accelerator."),
        (["--gpu_ids", "0,1"], 0, "gpu_ids=0,1 (--gpu_ids) has no effect: this machine has no accelerator."),
        (["--num_processes", "3"], 2, "3 processes share 2 GPUs of this machine; set num_processes to 2 or fewer."),
        (["--gpu_ids", "1"], 2, "2 processes share 1 GPU of this machine; set num_processes to 1 or fewer."),
    ],
)
def test_devices_that_are_not_there_are_told(told, words, devices, note):
    assert note in told(words, devices=devices)


@pytest.mark.parametrize("words", [["--num_processes", "2"], ["--cpu", "--num_processes", "3"], ["--gpu_ids", "all"]])
def test_devices_that_are_there_are_no_news(told, words):
    assert [note for note in told(words, devices=2) if "GPU" in note or "accelerator" in note][1:] == []


@pytest.mark.parametrize(
    ("script", "flag"),
    [
        (["--num_processes", "4"], "--num_processes"),
        (["x", "--multi-gpu"], "--multi-gpu"),
        (["--gpu_ids=0"], "--gpu_ids"),
    ],
)
def test_an_option_of_the_launch_after_the_script_is_told(told, script, flag):
    line = f"{flag} after the script is an argument of the script; write it before the script to set it for the launch."
    assert line in told([], script=script)


def test_an_option_of_many_scripts_is_theirs(told):
    assert len(told([], script=["--mixed_precision", "bf16", "--cpu", "--seed", "1"])) == 1


def test_the_number_of_processes_as_torchrun_spells_it_is_named(accel, script):
    finished = accel("launch", "--nproc_per_node", "2", script("print('started')"))
    assert (finished.returncode, finished.stdout) == (2, "")
    assert "Use --num_processes, the number of processes over all machines." in finished.stderr


def test_a_launch_begins_with_one_line(accel, script):
    finished = accel("launch", "--cpu", "--num_processes", "2", script("import sys; print('ran')"))
    assert finished.stdout == "ran\n" * 2
    assert finished.stderr == "accel launch: 2 processes, device cpu, backend automatic, precision no.\n"
    assert accel("launch", "-q", "--cpu", "--num_processes", "2", script("")).stderr == ""
