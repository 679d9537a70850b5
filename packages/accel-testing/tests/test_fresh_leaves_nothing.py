"""`fresh` keeps tests apart in any order: tests that leak all they can pass with it, and are found out without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from accel_state import PartialState
from accel_testing.processes import Processes, run_command

pytest.importorskip("pytest_randomly")

LEAKY = """
import logging, os, random
import pytest, torch
from accel_state import AcceleratorState, GradientState, PartialState, current
from accel_testing.fresh import fresh

THREADS = torch.get_num_threads()

@pytest.fixture(autouse=True)
def clean():
    if "KEPT_APART" in os.environ:
        with fresh():
            yield
    else:
        yield

def leak():
    AcceleratorState("bf16", cpu=True)
    GradientState().sync_gradients = False
    os.environ.update(ACCELERATE_MIXED_PRECISION="fp16", FSDP_VERSION="2", RANK="0", WORLD_SIZE="1", LEFT="1")
    torch.set_num_threads(THREADS + 1)
    torch.set_default_dtype(torch.float64)
    logging.getLogger().setLevel(logging.DEBUG)

def check():
    assert current.process_or_none() is None
    assert current.run_or_none() is None
    assert current.gradient() is None
    assert {"ACCELERATE_MIXED_PRECISION", "FSDP_VERSION", "RANK", "LEFT"}.isdisjoint(os.environ)
    assert torch.get_num_threads() == THREADS
    assert torch.get_default_dtype() is torch.float32
    assert logging.getLogger().level == logging.WARNING

@pytest.mark.parametrize("turn", range(4))
def test_leaks(turn):
    check()
    leak()
    assert PartialState().num_processes == 1

def test_generators_are_put_back():
    states = random.getstate(), torch.get_rng_state()
    with fresh():
        random.random()
        torch.rand(1)
        torch.manual_seed(0)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])

def test_a_failure_inside_is_no_leak():
    with pytest.raises(KeyError):
        with fresh():
            leak()
            raise KeyError
    check()
"""


PROGRAM = """
import os, pytest
options = ["-q", "-p", "no:cacheprovider", "-p", "randomly", "test_leaky.py"]
print("with it", [int(pytest.main([*options, f"--randomly-seed={seed}"])) for seed in (1, 2, 3)])
del os.environ["KEPT_APART"]
print("without it", int(pytest.main([*options, "-k", "test_leaks"])))
"""


def test_tests_that_leak_pass_in_any_order_and_are_found_out_without_it(tmp_path: Path) -> None:
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    done = run_command([sys.executable, "-c", PROGRAM], cwd=tmp_path, env={"KEPT_APART": "1"})
    assert "with it [0, 0, 0]" in done.stdout, done.stdout
    assert done.stdout.count("6 passed") == 3
    assert "without it 1" in done.stdout
    assert "3 failed, 1 passed" in done.stdout


def total_over_a_mesh(groups_before: int) -> float:
    PartialState(cpu=True)
    for _ in range(groups_before):
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["tp"]
    ones = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
    return float(ones.sum().full_tensor())


def test_fresh_clears_the_meshes_that_dtensor_has_cached(two: Processes) -> None:
    assert [two.run(total_over_a_mesh, groups) for groups in (3, 0)] == [[6.0, 6.0]] * 2
