"""`accel check-plan`: scripts as some ranks of a world that is not there."""

from __future__ import annotations

import json
import os
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import accel_check.started
from accel_check.check_plan import CheckPlan, PlanReport
from accel_testing.processes import run_command

pytestmark = [pytest.mark.usefixtures("preloaded_python")]
# A plan follows DistributedDataParallel also where a module has imported the class before the plan begins.
PRELOADED = (
    *("accel_torch.accelerator", "accel_plugins.ddp.strategy"),
    *("accel_check.fake_world", "accel_check.recorder"),
)

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(256, 8))
{divide}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(1024, 256), torch.randint(8, (1024,)))
for inputs, targets in DataLoader(data, batch_size={batch}, sampler=DistributedSampler(data)):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    {reduce}
    {clip}
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""
SHARDED = "[fully_shard(block) for block in model]; fully_shard(model)"
DIVIDED = """mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
for block in list(model)[:4]:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])"""
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
BY_HAND = "[dist.all_reduce(one.grad) for one in model.parameters()]"


def check(
    folder: Path, *options: str, divide: str = "", reduce: str = "", batch: str = "4", clip: str = CLIP
) -> tuple[int, Any]:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(divide=divide, reduce=reduce, batch=batch, clip=clip), encoding="utf-8")
    words = [sys.executable, str(accel_check.started.__file__), "check-plan", "--json", "--processes", "64", *options]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = run_command([*words, str(script)], timeout=280, env=environment)
    assert finished.stdout, str(finished)
    report = json.loads(finished.stdout)
    schema = files("accel_check").joinpath("schemas", "check-plan.json").read_text(encoding="utf-8")
    jsonschema.validate(report, json.loads(schema))
    return finished.returncode, report


OURS = """
import sys
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, TorchTensorParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(100000):
            yield torch.full((64,), float(number)), number % 8


plan = TorchTensorParallelPlugin(parallelize_plan={{"*.up": "colwise", "*.down": "rowwise"}})
project = ProjectConfiguration("{folder}", automatic_checkpoint_naming=True, total_limit=1)
accelerator = Accelerator(
    gradient_accumulation_steps=2,
    project_config=project,
    log_with="tensorboard",
    torch_tp_plugin=plan if "tp" in sys.argv else None,
)
accelerator.init_trackers("run")
model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 8))
model[0].requires_grad_("frozen" not in sys.argv)
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
loader = DataLoader(Stream(), batch_size=4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
assert accelerator.load_state(missing_ok=True) is None
for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if accelerator.is_main_process or "apart" not in sys.argv:
        accelerator.log({{"loss": accelerator.gather(loss).mean().item()}})
    accelerator.gather_for_metrics((inputs, targets))
    if accelerator.sync_gradients:
        accelerator.save_state()
    accelerator.save_model(model, "{folder}/weights")
    torch.save(model.state_dict(), "{folder}/state.pt")
"""


def check_ours(folder: Path, *options: str, arguments: tuple[str, ...] = ()) -> tuple[int, Any]:
    """The exit code and the report for a script with the Accelerator, which must not touch its folder."""
    script, own = folder / "train.py", folder / "run"
    own.mkdir()
    (own / "kept").write_text("kept", encoding="utf-8")
    script.write_text(OURS.format(folder=own), encoding="utf-8")
    words = [sys.executable, str(accel_check.started.__file__), "check-plan", "--json", *options]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = run_command([*words, str(script), *arguments], timeout=280, env=environment)
    assert finished.stdout, str(finished)
    assert [one.name for one in own.iterdir()] == ["kept"]
    return finished.returncode, json.loads(finished.stdout)


@pytest.mark.parametrize(
    ("options", "arguments", "share", "neighbours"),
    [
        (("--axes", "dp_shard=16,tp=4", "--memory", "1GiB"), ("tp",), 64, {1, 4, 63}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (("--processes", "64"), (), 1, {1, 63}),
                (("--processes", "64"), ("frozen",), 1, {1, 63}),
                (("--processes", "64", "--backend", "fsdp2", "--mixed_precision", "fp16"), (), 64, {1, 63}),
                (("--processes", "64", "--backend", "fsdp1"), (), 64, {1, 63}),
                (("--processes", "64", "--launch=--use_fsdp --fsdp_version 2"), (), 64, {1, 63}),
                (("--axes", "dp_replicate=8,dp_shard=8"), (), 8, {1, 8, 63}),
                (("--axes", "dp_shard=16,cp=4"), (), 64, {1, 4, 63}),
                (("--axes", "tp=4"), ("tp",), 4, {1, 3}),
                (("--processes", "1"), (), 1, set()),
            )
        ),
    ],
)
def test_a_script_with_the_accelerator_is_sound_and_its_folder_stays(
    options: tuple[str, ...], arguments: tuple[str, ...], share: int, neighbours: set[int], tmp_path: Path
) -> None:
    code, report = check_ours(tmp_path, *options, arguments=arguments)
    assert (code, report["verdict"], report["findings"]) == (0, "equal", []), report
    assert set(report["ranks"]) == {0, *neighbours}
    parameters = 4 * (4 * (2 * 64 * 256 + 256 + 64) + 64 * 8 + 8)
    assert report["memory"]["Total"] > 3 * parameters // share
    assert not report["written"]


def test_a_gather_of_one_rank_is_named_with_its_line(tmp_path: Path) -> None:
    code, report = check_ours(tmp_path, "--processes", "8", arguments=("apart",))
    assert (code, report["verdict"]) == (1, "differs"), report
    assert "header of 32768 elements on rank 0" in report["findings"][0]
    assert "(train.py:" in report["findings"][0]


@pytest.mark.parametrize(
    ("divide", "operations", "share"),
    [
        (SHARDED, {"allgather_base", "reduce_scatter_base", "all_reduce"}, 64),
        pytest.param("model = DistributedDataParallel(model)", {"allreduce"}, 1, marks=pytest.mark.slow),
        pytest.param(DIVIDED, {"allgather_base", "reduce_scatter_base"}, 64, marks=pytest.mark.slow),
    ],
)
def test_a_plan_is_sound_and_its_memory_is_that_of_a_share(
    divide: str, operations: set[str], share: int, tmp_path: Path
) -> None:
    code, report = check(tmp_path, "--memory", "1GiB", divide=divide, clip="" if divide == DIVIDED else CLIP)
    assert (code, report["verdict"]) == (0, "equal"), report
    assert operations <= set(report["collectives"]), report
    assert {0, 1, 63} <= set(report["ranks"])
    parameters = 4 * (4 * 2 * 256 * 1024 + 4 * (1024 + 256) + 256 * 8 + 8)
    # Parameters, and two states of AdamW; biases of the division of tensors are whole.
    assert report["memory"]["Parameter"] >= parameters // share
    assert report["memory"]["Total"] > 3 * parameters // share
    assert any(place.startswith("train.py:") for place in report["read"])


@pytest.mark.slow
def test_gradients_that_nobody_reduces_are_named(tmp_path: Path) -> None:
    code, report = check(tmp_path, divide="fully_shard(model, ignored_params={model[4].bias})", clip="")
    assert (code, report["findings"]) == (1, ["no collective reduces the gradient of 4.bias"]), report


def test_a_gradient_that_is_reduced_twice_is_named(tmp_path: Path) -> None:
    code, report = check(tmp_path, reduce=f"{BY_HAND}; dist.all_reduce(model[4].bias.grad)")
    assert code == 1, report
    assert report["findings"] == ["the gradient of 4.bias is reduced 2 times in a step of 1 backward pass"]


FLAT = """
    flat = torch.cat([one.grad.flatten() for one in model.parameters()]) / world
    dist.all_reduce(flat)
    TWICE
    for one, mean in zip(model.parameters(), flat.split([one.numel() for one in model.parameters()])):
        one.grad.copy_(mean.view_as(one))
"""


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_gradients_in_a_flat_buffer_are_followed(times: int, tmp_path: Path) -> None:
    code, report = check(tmp_path, reduce=FLAT.replace("TWICE", "dist.all_reduce(flat)" * (times - 1)).strip())
    assert code == times - 1, report
    assert ("reduced 2 times" in str(report["findings"])) is (times == 2)


NAMED = """device = torch.device("cuda", rank)
torch.cuda.set_device(device)
model = model.to(device)
mesh = init_device_mesh("cuda", (world,))
fully_shard(model.cuda(), mesh=mesh)
torch.zeros(2, device="cuda:0").to(device, non_blocking=True)"""


def test_a_script_that_names_an_accelerator_needs_none(tmp_path: Path) -> None:
    reduce = "torch.cuda.synchronize()"
    code, report = check(tmp_path, divide=NAMED, reduce=reduce, clip='torch.autocast("cuda", dtype=torch.bfloat16)')
    assert (code, report["verdict"]) == (0, "equal"), report


@pytest.mark.slow
def test_a_plan_that_does_not_fit_says_how_much_is_missing(tmp_path: Path) -> None:
    code, report = check(tmp_path, "--memory", "16MiB", reduce=BY_HAND)
    assert code == 1, report
    assert "more than a device has" in report["findings"][0]


@pytest.mark.slow
def test_collectives_that_differ_between_ranks_are_named_with_their_line(tmp_path: Path) -> None:
    code, report = check(tmp_path, "--ranks", "17", reduce=f"{BY_HAND} if rank != 17 else None")
    assert code == 1, report
    assert "and rank 17 0" in report["findings"][-1]


@pytest.mark.slow
def test_a_number_that_becomes_zero_on_many_processes_is_explained(tmp_path: Path) -> None:
    code, report = check(tmp_path, reduce=BY_HAND, batch="8 // world")
    assert (code, report["verdict"]) == (1, "differs")
    assert "does the script divide a number by 64 processes" in report["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("divide", "reason"),
    [
        ("model[0].up.weight.detach().numpy()", "numpy() is not supported"),
        ("torch.randn(4)[torch.randn(4) > 0]", "DynamicOutputShape"),
    ],
)
def test_what_needs_values_or_other_processes_is_not_verified(divide: str, reason: str, tmp_path: Path) -> None:
    code, report = check(tmp_path, divide=divide)
    assert (code, report["verdict"]) == (3, "not verified"), report
    assert reason in report["reason"]


def test_ranks_are_those_of_the_world(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("", encoding="utf-8")
    words = [sys.executable, str(accel_check.started.__file__), "check-plan", "--processes", "4", "--ranks", "4"]
    assert run_command([*words, str(script)], timeout=100).returncode == 2


def test_a_report_names_sizes_in_mib() -> None:
    report = PlanReport("equal", "two steps run", ranks=[0], memory={"Total": 5 << 20}, read=["a.py:1"])
    report.collectives = {"allreduce": {"calls": 2, "bytes": 3 << 20}}
    assert "allreduce: 2 in a step, 3.0 MiB" in str(report)
    assert "memory, total: 5.0 MiB" in str(report)
    assert CheckPlan.help
