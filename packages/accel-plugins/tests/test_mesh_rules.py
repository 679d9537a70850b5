"""The table of axes that go together: everything is either in it or refused with a reason."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest

from accel_plugins import mesh
from accel_plugins.ddp.manifest import MANIFEST as DDP
from accel_plugins.fsdp.manifest import FSDP2
from accel_plugins.manifest import Axis, Capabilities, Manifest
from accel_plugins.resolve import choose
from accel_plugins.single.manifest import MANIFEST as SINGLE
from accel_state import PartialState
from accel_state.errors import Conflict
from accel_state.mesh import ParallelismConfig
from accel_testing.fresh import fresh

ANY = Manifest("any", "a.b:C", axes=frozenset(Axis))
SUBSETS = [frozenset(axes) for size in range(6) for axes in itertools.combinations(Axis, size)]


class AxesOnly:
    """Axes without the checks of `ParallelismConfig`, which refuses some by itself."""

    sp_by_engine = False
    sp_backend = "torch"

    def __init__(self, axes: frozenset[Axis]) -> None:
        self.active_mesh_dims = [axis.value for axis in axes]


@pytest.mark.parametrize("axes", SUBSETS)
def test_every_combination_is_permitted_or_refused_with_a_reason(axes: frozenset[Axis]) -> None:
    parallelism_config: Any = AxesOnly(axes)
    if mesh.takes(ANY, axes):
        mesh.check_mesh(ANY, parallelism_config)
        return
    with pytest.raises(Conflict) as caught:
        mesh.check_mesh(ANY, parallelism_config)
    assert caught.value.obstacle
    assert caught.value.remedy
    assert all(axis.value in caught.value.failure for axis in axes)


def test_a_table_without_doubles_whose_exclusions_do_not_contradict_it() -> None:
    permitted = [combination.axes for combination in mesh.PERMITTED]

    assert len(set(permitted)) == len(permitted)
    for exclusion in mesh.EXCLUSIONS:
        assert any(exclusion.axes <= axes and axes not in permitted for axes in SUBSETS)


@pytest.mark.parametrize(
    ("manifest", "sizes", "obstacle", "remedy"),
    [
        (DDP, {"dp_shard_size": 2}, "not dp_shard", "fsdp_plugin="),
        (DDP, {"tp_size": 2}, "not tp", "Choose another backend"),
        (SINGLE, {"cp_size": 2}, "supports no axis", "Choose another backend"),
        (FSDP2, {"dp_replicate_size": 2}, "no axis specifies over how many", "dp_shard_size above 1"),
        (FSDP2, {"tp_size": 2, "cp_size": 2}, "plain tensors", "Set one of"),
        (FSDP2, {"tp_size": 2, "sp_size": 2, "sp_backend": "torch"}, "heads of attention", "Set one of"),
        (FSDP2, {"sp_size": 2}, "requires an engine that shards the sequence", "sp_backend='torch'"),
        (DDP, {"sp_size": 2}, "requires an engine that shards the sequence", "deepspeed_plugin"),
    ],
)
def test_mesh_rules_refuse_axes_that_a_backend_lacks(
    manifest: Manifest, sizes: dict[str, Any], obstacle: str, remedy: str
) -> None:
    with pytest.raises(Conflict) as caught:
        mesh.check_mesh(manifest, ParallelismConfig(**sizes))
    assert obstacle in caught.value.obstacle
    assert remedy in caught.value.remedy


def test_an_engine_that_divides_the_sequence_is_left_to_do_it() -> None:
    engine = Manifest(
        "engine", "a.b:C", axes=frozenset({Axis.SEQUENCE}), capabilities=Capabilities(own_sequence_parallelism=True)
    )
    mesh.check_mesh(engine, ParallelismConfig(sp_size=2))


def test_an_arrangement_chooses_a_backend_that_takes_it_where_nobody_named_one() -> None:
    with fresh():
        PartialState(cpu=True)
        assert choose(parallelism_config=ParallelismConfig()).name == "single"
        assert choose(parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2)).name == "fsdp2"
        with pytest.raises(Conflict, match="'single'"):
            choose("single", parallelism_config=ParallelismConfig(tp_size=2))


def test_the_table_loads_without_torch() -> None:
    code = f"import sys; sys.path[:] = {sys.path!r}; import accel_plugins.mesh; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=250, check=False).returncode == 0


def test_a_backend_combines_its_own_axes_with_those_that_can_be_combined() -> None:
    pipeline = Manifest("pipeline", "a.b:C", axes=frozenset({"pp", Axis.REPLICATE, Axis.TENSOR}))
    config = ParallelismConfig(dp_replicate_size=2, axes={"pp": 2})
    mesh.check_mesh(pipeline, config)
    assert mesh.takes(pipeline, mesh.active_axes(config))
    assert mesh.named(mesh.active_axes(config)) == "pp x dp_replicate"
    with pytest.raises(Conflict, match=r"pp x dp_replicate with the backend 'ddp'(?s:.)*not pp"):
        mesh.check_mesh(DDP, config)
    foreign: Any = AxesOnly(frozenset({Axis.REPLICATE, Axis.TENSOR}))
    foreign.active_mesh_dims.append("pp")
    with pytest.raises(Conflict, match="does not accept sharded tensors"):
        mesh.check_mesh(pipeline, foreign)
