"""ParallelismConfig: sizes, names of axes, variables, bad combinations, and the mesh itself."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state import AcceleratorState
from accel_state.data_shards import parallelism_config_from_environment
from accel_state.errors import Conflict, SettingError
from accel_state.mesh import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accel_state.settings.environ import to_environment
from accel_testing.processes import Processes

pytestmark = pytest.mark.usefixtures("fresh_state")


NAMES = ("dp_dim_names", "non_dp_dim_names", "dp_shard_cp_dim_names", "dp_cp_dim_names", "fsdp_dim_names")


@pytest.mark.parametrize(
    ("sizes", "names", "total", "of_data"),
    [
        ({}, ([], [], [], [], ["dp_shard_cp"]), 1, 1),
        ({"dp_replicate": 2}, (["dp_replicate"], [], [], ["dp_replicate"], ["dp_replicate", "dp_shard_cp"]), 2, 2),
        ({"dp_shard": 2}, (["dp_shard"], [], ["dp_shard"], ["dp_shard"], ["dp_shard_cp"]), 2, 2),
        ({"tp": 2}, ([], ["tp"], [], [], ["dp_shard_cp"]), 2, 1),
        ({"cp": 2}, ([], ["cp"], ["cp"], ["cp"], ["dp_shard_cp"]), 2, 1),
        ({"dp_shard": 2, "sp": 3}, (["dp_shard"], ["sp"], ["dp_shard"], ["dp_shard"], ["dp_shard_cp"]), 6, 2),
        (
            {"dp_replicate": 2, "dp_shard": 3, "tp": 5, "cp": 7},
            (
                ["dp_replicate", "dp_shard"],
                ["tp", "cp"],
                ["dp_shard", "cp"],
                ["dp_replicate", "dp_shard", "cp"],
                ["dp_replicate", "dp_shard_cp"],
            ),
            210,
            6,
        ),
    ],
)
def test_axis_names_and_sizes_of_a_parallelism_config(
    sizes: dict[str, int], names: tuple[list[str], ...], total: int, of_data: int
) -> None:
    config = ParallelismConfig(**{f"{axis}_size": size for axis, size in sizes.items()})
    assert tuple(getattr(config, name) for name in NAMES) == names
    assert config.active_mesh_dims == names[0] + names[1]
    assert (config.total_size, config.data_parallel_size) == (total, of_data)
    assert config.non_data_parallel_size == total // of_data
    for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp"):
        assert getattr(config, f"{axis}_enabled") is (axis in sizes)


def test_an_axis_gets_its_default_handler() -> None:
    config = ParallelismConfig(tp_size=2, cp_size=2)
    assert config.tp_handler == TorchTensorParallelConfig()
    assert config.cp_handler == TorchContextParallelConfig("allgather")
    assert config.sp_handler is None
    assert isinstance(ParallelismConfig(sp_size=2).sp_handler, DeepSpeedSequenceParallelConfig)
    own = TorchContextParallelConfig("alltoall")
    assert ParallelismConfig(cp_size=2, cp_handler=own).cp_handler is own


def test_sizes_default_to_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "None")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "sdpa")
    config = ParallelismConfig(cp_size=2)
    assert (config.tp_size, config.cp_size, config.dp_shard_size) == (4, 2, 1)
    assert config.cp_handler is not None
    assert config.cp_handler.cp_comm_strategy == "alltoall"
    assert ParallelismConfig(tp_size=2).tp_size == 2
    assert DeepSpeedSequenceParallelConfig() == DeepSpeedSequenceParallelConfig(None, True, "sdpa")


def test_a_parallelism_config_is_read_back_from_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=3)
    for name, value in to_environment(config).items():
        monkeypatch.setenv(name, value)
    assert ParallelismConfig() == config


def test_a_mesh_is_read_from_the_environment_only_if_the_launcher_enables_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    assert parallelism_config_from_environment() is None
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    assert parallelism_config_from_environment() == ParallelismConfig(tp_size=2)


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"tp_size": 0}, SettingError, "tp_size"),
        ({"dp_shard_size": -1}, SettingError, "dp_shard_size"),
        ({"tp_size": "2"}, SettingError, "tp_size"),
        ({"tp_size": 1.5}, SettingError, "tp_size"),
        ({"tp_size": True}, SettingError, "tp_size"),
        ({"cp_backend": "nccl"}, SettingError, "cp_backend"),
        ({"sp_backend": "megatron"}, SettingError, "sp_backend"),
        ({"tp_handler": 5}, SettingError, "tp_handler=5"),
        ({"cp_size": 2, "cp_handler": TorchTensorParallelConfig()}, SettingError, "TorchContextParallelConfig"),
        ({"cp_size": 2, "sp_size": 2}, Conflict, "Both shard the sequence"),
        ({"dp_replicate_size": 2, "tp_size": 2}, Conflict, "dp_shard_size above 1"),
        ({"dp_replicate_size": 2, "cp_size": 2}, Conflict, "dp_shard_size above 1"),
    ],
)
def test_invalid_sizes_and_handlers_are_refused(options: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        ParallelismConfig(**options)


def test_context_parallelism_of_copies_has_to_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_ALLOW_CP_STANDALONE", "true")
    assert ParallelismConfig(dp_replicate_size=2, cp_size=2).active_mesh_dims == ["dp_replicate", "cp"]
    with pytest.raises(Conflict, match="dp_shard_size above 1"):
        ParallelismConfig(dp_replicate_size=2, tp_size=2)


def test_an_engine_that_divides_the_sequence_has_no_axis_in_the_mesh() -> None:
    by_engine, by_torch = ParallelismConfig(sp_size=2), ParallelismConfig(sp_size=2, sp_backend="torch")

    assert (by_engine.sp_by_engine, by_torch.sp_by_engine) == (True, False)
    assert (by_engine.dp_cp_dim_names, by_torch.dp_cp_dim_names) == ([], ["sp"])


def test_names_and_sizes_of_the_mesh_are_known_before_it_is_built() -> None:
    assert ParallelismConfig()._get_mesh() == ()
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, tp_size=5, cp_size=7)
    assert config._get_mesh() == (("dp_replicate", "dp_shard", "cp", "tp"), (2, 3, 7, 5))
    assert ParallelismConfig(sp_size=2, tp_size=3)._get_mesh() == (("sp", "tp"), (2, 3))


def test_a_size_variable_that_is_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "two")
    with pytest.raises(SettingError, match=r"\$PARALLELISM_CONFIG_CP_SIZE"):
        ParallelismConfig()


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"])
def test_attention_that_works_on_a_divided_sequence(name: str) -> None:
    assert DeepSpeedSequenceParallelConfig(sp_attn_implementation=name).sp_attn_implementation == name


@pytest.mark.parametrize("name", ["eager", "flex_attention", "a/b", "flash-attn"])
def test_attention_that_ulysses_does_not_support_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match="sharded sequence"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation=name)


def test_sequence_parallelism_requires_a_length_or_variable_lengths() -> None:
    with pytest.raises(Conflict, match="PARALLELISM_CONFIG_SP_SEQ_LENGTH"):
        DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)
    assert DeepSpeedSequenceParallelConfig(128, False).sp_seq_length == 128
    with pytest.raises(SettingError, match="cp_comm_strategy"):
        TorchContextParallelConfig("gossip")


def test_a_parallelism_config_as_json() -> None:
    text = json.dumps(ParallelismConfig(cp_size=2).to_json())
    assert json.loads(text)["cp_handler"] == {"cp_comm_strategy": "allgather"}
    assert "device_mesh" not in json.loads(text)


@pytest.fixture
def sixteen(fresh_state: None) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=16)


@pytest.mark.usefixtures("sixteen")
@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        (
            {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2, "tp_size": 2},
            {"dp": (4, 0), "dp_shard_cp": (4, 1), "dp_cp": (8, 1), "dp_replicate": (2, 0), "cp": (2, 1), "tp": (2, 1)},
        ),
        ({"dp_shard_size": 4, "cp_size": 4}, {"dp": (4, 0), "dp_shard_cp": (16, 3), "dp_cp": (16, 3), "cp": (4, 3)}),
        ({"tp_size": 16}, {"tp": (16, 3)}),
        (
            {"dp_shard_size": 4, "sp_size": 4, "sp_backend": "torch"},
            {"dp": (4, 0), "dp_shard_cp": (16, 3), "dp_cp": (16, 3), "sp": (4, 3)},
        ),
    ],
)
def test_size_and_rank_of_each_submesh(sizes: dict[str, int], parts: dict[str, tuple[int, int]]) -> None:
    config = ParallelismConfig(**sizes)
    mesh = config.get_device_mesh("cpu")
    assert mesh is not None
    assert config.get_device_mesh() is mesh
    for name, place in parts.items():
        part = config.submesh(name)
        assert part is not None
        assert (part.size(), part.get_local_rank()) == place
    absent = {"dp", "dp_shard_cp", "dp_cp", "dp_replicate", "dp_shard", "cp", "tp"} - set(parts) - {"dp_shard"}
    assert [name for name in absent if config.submesh(name) is not None] == []


@pytest.mark.usefixtures("sixteen")
def test_device_meshes_that_are_refused() -> None:
    with pytest.raises(Conflict, match="requires 4 processes"):
        ParallelismConfig(tp_size=4).build_device_mesh("cpu")
    config = ParallelismConfig(tp_size=16)
    with pytest.raises(SettingError, match="Pass the device type"):
        config.get_device_mesh()
    config.get_device_mesh("cpu")
    with pytest.raises(Conflict, match="'cuda'"):
        config.get_device_mesh("cuda")


def test_no_device_mesh_without_axes_of_torch() -> None:
    assert ParallelismConfig().get_device_mesh("cpu") is None
    assert ParallelismConfig(sp_size=2).build_device_mesh("cpu") is None
    assert ParallelismConfig(tp_size=2).submesh("tp") is None


def run_of_four() -> dict[str, float]:
    config = ParallelismConfig(dp_shard_size=2, tp_size=2)
    state = AcceleratorState(cpu=True, parallelism_config=config)
    assert state.parallelism_config is config
    assert AcceleratorState().device_mesh is state.device_mesh is config.get_device_mesh()
    with pytest.raises(Conflict, match="parallelism_config"):
        AcceleratorState(parallelism_config=ParallelismConfig(tp_size=4))
    sums = {}
    for name in ("dp", "tp", "dp_cp"):
        part = config.submesh(name)
        assert part is not None
        total = torch.tensor(float(state.process_index))
        dist.all_reduce(total, group=part.get_group())
        sums[name] = total.item()
    state.wait_for_everyone()
    return sums


def test_a_run_keeps_its_mesh_and_processes_reach_their_neighbours_along_each_axis(four: Processes) -> None:
    sums = four.run(run_of_four)
    assert [rank["tp"] for rank in sums] == [1.0, 1.0, 5.0, 5.0]
    assert [rank["dp"] for rank in sums] == [2.0, 4.0, 2.0, 4.0]
    assert [rank["dp_cp"] for rank in sums] == [2.0, 4.0, 2.0, 4.0]


def test_a_mesh_larger_than_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(Conflict, match=r"tp=2: it requires 2 processes"):
        AcceleratorState(cpu=True)
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "1")
    assert AcceleratorState(cpu=True).device_mesh is None


def test_axes_of_a_backend_are_outside_of_all_others_and_divide_no_samples() -> None:
    config = ParallelismConfig(dp_replicate_size=2, axes={"pp": 2, "ep": 3, "none": 1})
    assert config.active_mesh_dims == ["pp", "ep", "dp_replicate"]
    assert (config.size("pp"), config.data_parallel_size, config.total_size) == (2, 2, 12)
    assert config.to_json()["axes"] == {"pp": 2, "ep": 3, "none": 1}
    with pytest.raises(Conflict, match=r"pp=2 x ep=3 x dp_replicate=2: it requires 12 processes"):
        config.check_world(4)


def test_axes_of_a_backend_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_AXES", "pp=2, ep=3")
    assert ParallelismConfig().axes == {"pp": 2, "ep": 3}


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2}, {"pp": 0}, {"pp": "two"}, {"no name": 2}, ["pp"]])
def test_axes_without_a_name_or_a_size_of_their_own_are_refused(axes: Any) -> None:
    with pytest.raises(SettingError, match="axes"):
        ParallelismConfig(axes=axes)
