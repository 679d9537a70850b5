"""Launching from notebooks, preparing launches, config classes, menus and commands, by their old names."""

from __future__ import annotations

import argparse
import os
import sys

import pytest
import yaml

from accel_state.errors import Missing, SettingError
from accel_state.testing.processes import run_command
from accelerate.commands import launch, to_fsdp2
from accelerate.commands.config import config_args, default, update
from accelerate.commands.menu import BulletMenu, helpers, keymap
from accelerate.commands.menu import input as keys_of
from accelerate.utils import launch as preparing
from accelerate.utils import write_basic_config


@pytest.fixture
def job(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("ACCEL", "WORLD_SIZE", "RANK", "LOCAL_", "MASTER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    path = tmp_path / "job.py"
    path.write_text("")
    return str(path)


def parsed(*words):
    return launch.launch_command_parser().parse_args(list(words))


def test_a_notebook_launches_by_the_old_name(tmp_path):
    code = (
        "from pathlib import Path\n"
        "from accelerate import debug_launcher, notebook_launcher\n"
        "from accelerate.launchers import test_launch\n"
        "def work():\n"
        "    from accelerate import PartialState\n"
        "    test_launch()\n"
        "    state = PartialState()\n"
        "    Path(f'rank-{state.process_index}').write_text(str(state.num_processes))\n"
        "debug_launcher(work)\n"
        "notebook_launcher(Path('alone').write_text, ('1',), num_processes=1)\n"
    )
    done = run_command([sys.executable, "-c", code], timeout=100, env={"GLOO_SOCKET_IFNAME": "lo"}, cwd=tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {"rank-0": "2", "rank-1": "2", "alone": "1"}, done.stderr


def test_command_and_variables_of_one_process(job):
    command, environment = preparing.prepare_simple_launcher_cmd_env(
        parsed("--cpu", "--num_processes", "1", "--mixed_precision", "bf16", job, "--lr", "1")
    )
    assert command[0] == sys.executable
    assert command[-3:] == [job, "--lr", "1"]
    assert (environment["ACCELERATE_MIXED_PRECISION"], environment["ACCELERATE_USE_CPU"]) == ("bf16", "true")
    assert environment["PATH"] == os.environ["PATH"]


def test_variables_of_several_processes(job):
    words = ("--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--cpu", job)
    environment = preparing.prepare_multi_gpu_env(parsed(*words))
    assert (environment["ACCELERATE_USE_FSDP"], environment["FSDP_VERSION"]) == ("true", "2")


def test_variables_that_are_added(job):
    words = ("--fp8_format", "E4M3", "--parallelism_config_tp_size", "2", job)
    assert preparing.setup_fp8_env(parsed(*words), {"A": "1"}) == {"A": "1", "ACCELERATE_FP8_FORMAT": "E4M3"}
    assert preparing.prepare_extend_env_parallelism_config(parsed(*words), {}) == {
        "PARALLELISM_CONFIG_TP_SIZE": "2",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    }
    arguments, environment = preparing.prepare_tpu(parsed("--mixed_precision", "bf16", job), {}, pod=True)
    assert isinstance(arguments, argparse.Namespace)
    assert environment == {"XLA_USE_BF16": "1", "ACCELERATE_IN_TPU_POD": "1"}


def test_a_path_is_added_at_the_end(monkeypatch):
    monkeypatch.setenv("SOME_PATH", "/a")
    assert preparing.env_var_path_add("SOME_PATH", "/b") == f"/a{os.pathsep}/b"
    assert preparing.env_var_path_add("NO_SUCH_PATH", "/b") == "/b"


def test_a_function_that_knows_its_place(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FORK_LAUNCHED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "4")
    seen = []
    preparing.PrepareForLaunch(lambda word: seen.append((word, os.environ["RANK"])), "multi_cpu")(3, "hello")
    assert seen == [("hello", "3")]


def test_a_job_of_sagemaker(job):
    config = config_args.SageMakerConfig(
        "AMAZON_SAGEMAKER", "NO", "bf16", False, False, "ml.p3.2xlarge", "role", additional_args={"volume_size": 3}
    )
    estimator, inputs = preparing.prepare_sagemager_args_inputs(config, parsed(job, "--lr", "0.1"))
    assert (estimator["instance_type"], estimator["volume_size"], inputs) == ("ml.p3.2xlarge", 3, None)
    assert estimator["hyperparameters"] == {"lr": 0.1}
    assert estimator["environment"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    with pytest.raises(Missing, match="pip install"):
        launch.sagemaker_launcher(config, parsed(job))


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_config_is_written_and_read_back(tmp_path, suffix):
    config = config_args.ClusterConfig(
        "LOCAL_MACHINE", "FSDP", "bf16", False, False, num_processes=4, fsdp_config={"fsdp_version": 2}
    )
    path = str(tmp_path / f"run.{suffix}")
    getattr(config, f"to_{suffix}_file")(path)
    again = config_args.load_config_from_file(path)
    assert again == config
    assert getattr(config_args.ClusterConfig, f"from_{suffix}_file")(path) == config
    assert config.to_dict()["distributed_type"] == "FSDP"
    assert "gpu_ids" not in config.to_dict()


def test_old_configs_and_wrong_ones(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("distributed_type: 'NO'\nfp16: true\ndynamo_backend: INDUCTOR\n")
    config = config_args.load_config_from_file(str(path))
    assert (config.mixed_precision, config.dynamo_config) == ("fp16", {"dynamo_backend": "INDUCTOR"})
    path.write_text("distributed_type: 'NO'\nnum_proceses: 2\n")
    with pytest.raises(ValueError, match=r"run.yaml:2 has the unknown key 'num_proceses'"):
        config_args.load_config_from_file(str(path))
    path.write_text("num_processes: 2\n")
    with pytest.raises(ValueError, match="distributed_type is missing"):
        config_args.load_config_from_file(str(path))
    with pytest.raises(SettingError, match="no such file"):
        config_args.load_config_from_file(str(tmp_path / "no.yaml"))


def test_the_usual_file(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    assert write_basic_config("bf16", str(path)) == str(path)
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "bf16"
    assert write_basic_config("bf16", str(path)) is False
    parser = argparse.ArgumentParser()
    ways = parser.add_subparsers()
    default.default_command_parser(ways, [])
    update.update_command_parser(ways, [])
    arguments = parser.parse_args(["update", "--config_file", str(path)])
    arguments.func(arguments)
    arguments = parser.parse_args(["default", "--config-file", str(tmp_path / "new.yaml")])
    arguments.func(arguments)
    assert capsys.readouterr().out.splitlines() == [f"Updated {path}.", f"Written to {tmp_path / 'new.yaml'}."]


def test_a_config_for_the_second_version_of_fsdp():
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"}}
    converted = to_fsdp2.convert_config_to_fsdp2(config)
    assert converted["fsdp_config"]["fsdp_version"] == 2
    assert converted["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert to_fsdp2.convert_config_to_fsdp2(converted) == converted


def test_a_menu_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda question: "2")
    assert BulletMenu("Which?", ["a", "b"]).run() == 1
    menu = BulletMenu("Which?", ["a", "b"])
    menu.move_direction(helpers.Direction.DOWN, 5)
    assert menu.position == 1
    assert menu.select() == 1
    with pytest.raises(KeyboardInterrupt):
        menu.interrupt()


@pytest.mark.parametrize(("keys", "result"), [("a", "a"), ("\x1b[A", chr(321)), ("\r", "\r"), ("\x1bx", sys.maxsize)])
def test_keys(monkeypatch, keys, result):
    pressed = iter(keys)
    monkeypatch.setattr("accelerate.legacy.menus.get_raw_chars", lambda: next(pressed))
    assert keymap.get_character() == result


def test_marked_methods_are_called_by_their_keys(monkeypatch):
    @keys_of.register
    class Counter:
        @keys_of.mark(keymap.KEYMAP["up"])
        def up(self):
            return "up"

        @keys_of.mark_multiple(ord("a"), ord("b"))
        def letter(self):
            return self.current_selection

    pressed = iter(["\x1b[A", "b", "z"])
    stream = iter("".join(pressed))
    monkeypatch.setattr("accelerate.legacy.menus.get_raw_chars", lambda: next(stream))
    assert [Counter.handle_input(Counter) for _ in range(3)] == ["up", "b", None]


@pytest.mark.parametrize(("option", "shown"), [("--fsdp_offload_params", "Offload params"), ("--tpu", "Tpu")])
def test_options_as_headings_show_them(option, shown):
    assert launch.clean_option(option) == shown
