"""Muon on every layout against one process: as torch steps shards, and with `WholeMatrices`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from accel_state.errors import CheckpointError, Conflict, NotOffered
from accel_testing.processes import Processes
from accel_torch import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
    WholeMatrices,
)

STEPS = 4
ACCUMULATED = 2
PLAN = {"1": "colwise", "3": "rowwise"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"fsdp": True},
    "hybrid": {"fsdp": True, "axes": {"dp_replicate_size": 2, "dp_shard_size": 2}},
    "fsdp2 x tp": {"fsdp": True, "axes": {"dp_shard_size": 2, "tp_size": 2}},
}


def accelerator_for(layout: str, **options: Any) -> Accelerator:
    chosen = LAYOUTS[layout]
    if "fsdp" in chosen:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(2)
    if "axes" in chosen:
        options["parallelism_config"] = ParallelismConfig(**chosen["axes"])
        if "tp_size" in chosen["axes"]:
            options["torch_tp_plugin"] = TorchTensorParallelPlugin(parallelize_plan=PLAN)
    return Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, **options)


def network() -> nn.Module:
    torch.manual_seed(0)
    # Rows that are uneven over two and three processes, and tall and wide matrices.
    return nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 14), nn.Tanh(), nn.Linear(14, 7), nn.Tanh(), nn.Linear(7, 5))


def optimizers(model: Any) -> tuple[Any, Any, Any]:
    """Muon for matrices, in two groups, beside AdamW for the rest; and a schedule of Muon."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    groups = [
        {"params": matrices[:1], "lr": 0.05, "weight_decay": 0.3},
        {"params": matrices[1:], "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    ]
    muon = torch.optim.Muon(groups, lr=0.02)
    return muon, torch.optim.AdamW(others, lr=0.01), torch.optim.lr_scheduler.StepLR(muon, 1, gamma=0.8)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(step))


def train(layout: str, whole: bool = False, mixed_precision: str = "no", steps: int = STEPS) -> dict[str, Any]:
    accelerator = accelerator_for(layout, mixed_precision=mixed_precision, step_scheduler_with_optimizer=False)
    model = network()
    muon, adamw, schedule = optimizers(model)
    model, muon, adamw, schedule = accelerator.prepare(model, muon, adamw, schedule)
    if whole:
        WholeMatrices(muon)
    norms = []
    for step in range(steps * ACCUMULATED):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch(step)).float().square().mean())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
            muon.step()
            adamw.step()
            muon.zero_grad()
            adamw.zero_grad()
            if accelerator.sync_gradients:
                schedule.step()
    states = [muon.state[parameter]["momentum_buffer"] for group in muon.param_groups for parameter in group["params"]]
    full = [state.full_tensor() if isinstance(state, DTensor) else state for state in states]
    return {
        "weights": {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()},
        "momentum": [state.tolist() for state in full],
        "norms": norms,
        "sharded": [isinstance(state, DTensor) for state in states],
    }


def near(ours: Any, theirs: Any, atol: float) -> bool:
    return all(
        torch.allclose(torch.tensor(one), torch.tensor(other), rtol=0, atol=atol)
        for one, other in zip(ours, theirs, strict=True)
    )


def check(answers: list[Any], expected: dict[str, Any], atol: float) -> None:
    """Compare with one process. Muon computes in bfloat16, so another order of additions shows in three digits."""
    weights = answers[0]["weights"]
    assert weights.keys() == expected["weights"].keys()
    assert near(weights.values(), expected["weights"].values(), atol)
    for answer in answers:
        assert near(answer["momentum"], expected["momentum"], atol)
        assert answer["norms"] == pytest.approx(expected["norms"], rel=10 * atol)


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_muon_of_torch_on_two_processes_is_that_of_one(two: Processes, layout: str, mixed_precision: str) -> None:
    expected = train("ddp", mixed_precision=mixed_precision)
    check(two.run(train, layout, False, mixed_precision), expected, 6e-3 if mixed_precision == "no" else 2e-2)


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("whole", [False, True])
def test_muon_on_three_processes_is_that_of_one(three: Processes, whole: bool) -> None:
    answers = three.run(train, "fsdp2", whole)
    check(answers, train("ddp"), 6e-3)
    assert all(all(answer["sharded"]) for answer in answers)


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("layout", ["hybrid", "fsdp2 x tp"])
def test_muon_of_torch_on_a_mesh_is_that_of_one_process(four: Processes, layout: str) -> None:
    check(four.run(train, layout), train("ddp"), 6e-3)


@pytest.mark.usefixtures("fresh_state")
def test_whole_matrices_on_two_processes_are_equal_to_one(two: Processes) -> None:
    answers = two.run(train, "fsdp2", True)
    check(answers, train("ddp"), 1e-6)
    assert all(all(answer["sharded"]) for answer in answers)


@pytest.mark.usefixtures("fresh_state")
def test_whole_matrices_in_bf16(two: Processes) -> None:
    check(two.run(train, "fsdp2", True, "bf16"), train("ddp", mixed_precision="bf16"), 2e-2)


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("layout", ["hybrid", "fsdp2 x tp"])
def test_whole_matrices_on_a_mesh_are_equal_to_one_process(four: Processes, layout: str) -> None:
    check(four.run(train, layout, True), train("ddp"), 1e-6)


# ---------------------------------------------------------------------- how much is computed and sent


class Counting(TorchDispatchMode):
    """Counts the products of matrices, and the elements that this process sends."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(("aten.mm", "aten.addmm")):
            self.products += 1
        elif name.startswith("c10d.alltoall_base"):
            self.sent += args[1].numel()
        elif name.startswith(("c10d", "_c10d_functional")) and "wait" not in name:
            raise AssertionError(f"{name} in a step")
        return func(*args, **(kwargs or {}))


def counted(layout: str, whole: bool) -> tuple[int, int]:
    accelerator = accelerator_for(layout)
    model = network()
    model, muon = accelerator.prepare(model, optimizers(model)[0])
    if whole:
        WholeMatrices(muon)
    for step in range(2):
        for index in range(ACCUMULATED):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch(index)).square().mean())
        with Counting() if step else nullcontext(Counting()) as counting:
            muon.step()
    return counting.products, counting.sent


@pytest.mark.usefixtures("fresh_state")
def test_each_matrix_is_orthogonalised_once_and_travels_at_most_twice(two: Processes) -> None:
    alone, _ = counted("ddp", False)
    elements = sum(parameter.numel() for parameter in network().parameters() if parameter.ndim == 2)
    answers = two.run(counted, "fsdp2", True)
    assert sum(products for products, _ in answers) == alone > 0
    assert 0 < sum(sent for _, sent in answers) <= 2 * elements


@pytest.mark.usefixtures("fresh_state")
def test_in_replicated_groups_too_and_once_more_for_the_other_replica(four: Processes) -> None:
    alone, _ = counted("ddp", False)
    elements = sum(parameter.numel() for parameter in network().parameters() if parameter.ndim == 2)
    answers = four.run(counted, "hybrid", True)
    assert sum(products for products, _ in answers) == alone
    assert 0 < sum(sent for _, sent in answers) <= 3 * elements


# ---------------------------------------------------------------------- checkpoints


def resume(layout: str, source: str, target: str = "", whole: bool = False) -> tuple[Any, Any]:
    """Take a step and save it, or load, save again and return the weights and the momentum."""
    accelerator = accelerator_for(layout)
    model = network()
    model, muon = accelerator.prepare(model, optimizers(model)[0])
    if whole:
        WholeMatrices(muon)
    if source:
        accelerator.load_state(source, allow_missing=("random_states",))
    else:
        for index in range(ACCUMULATED):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch(index)).square().mean())
                muon.step()
                muon.zero_grad()
    if target:
        accelerator.save_state(target)
    states = [muon.state[parameter]["momentum_buffer"] for group in muon.param_groups for parameter in group["params"]]
    full = [state.full_tensor() if isinstance(state, DTensor) else state for state in states]
    weights = {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}
    return weights, [state.tolist() for state in full]


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("whole", [False, True])
def test_checkpoints_of_muon_are_resharded_to_the_bit(
    four: Processes, two: Processes, tmp_path: Path, whole: bool
) -> None:
    on_four, on_one = str(tmp_path / "four"), str(tmp_path / "one")
    saved = four.run(resume, "hybrid", "", on_four, whole)[0]
    assert resume("ddp", on_four, on_one) == saved
    assert two.run(resume, "fsdp2", on_one, "", whole)[0] == saved


# ---------------------------------------------------------------------- any optimizer


class Shampoo(torch.optim.Optimizer):
    """A small optimizer with preconditioners of the rows and columns of whole matrices, and no options of Muon."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.eps = 1e-3

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, state = parameter.grad, self.state[parameter]
                if not state:
                    state["steps"] = 0
                    state["rows"], state["columns"] = (self.eps * torch.eye(size) for size in gradient.shape)
                state["steps"] += 1
                state["rows"] += gradient @ gradient.T
                state["columns"] += gradient.T @ gradient
                update = root(state["rows"]) @ gradient @ root(state["columns"])
                parameter.mul_(1 - group["lr"] * 0.1).sub_(group["lr"] * update)


def root(matrix: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T


def precondition(layout: str, source: str, target: str, steps: range) -> Any:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(2) if layout == "fsdp2" else None)
    model = network()
    optimizer = Shampoo([parameter for parameter in model.parameters() if parameter.ndim == 2], lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    if layout == "fsdp2":
        WholeMatrices(optimizer)
    if source:
        accelerator.load_state(source, allow_missing=("random_states",))
    for step in steps:
        accelerator.backward(model(batch(step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if target:
        accelerator.save_state(target)
    return {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.usefixtures("fresh_state")
def test_the_state_of_whole_matrices_moves_to_their_new_owners(
    two: Processes, three: Processes, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    expected = precondition("ddp", "", "", range(STEPS))
    two.run(precondition, "fsdp2", "", folder, range(STEPS // 2))
    resumed = three.run(precondition, "fsdp2", folder, "", range(STEPS // 2, STEPS))[0]
    assert near(resumed.values(), expected.values(), 1e-4)


def refuse(folder: str) -> list[str]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(2))
    model = network()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.ndim == 2], lr=0.05, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(batch(0)).square().mean())
    optimizer.step()
    with pytest.raises(Conflict) as stepped:
        WholeMatrices(optimizer)
    accelerator.save_state(folder)
    another = accelerator.prepare(torch.optim.SGD(list(optimizer.param_groups[0]["params"]), lr=0.05))
    whole = WholeMatrices(another)
    with pytest.raises(CheckpointError) as missing:
        accelerator.load_state(folder)
    with pytest.raises(NotOffered) as closure:
        another.step(lambda: 0.0)
    whole.remove()
    another.step()
    return [str(caught.value) for caught in (stepped, missing, closure)]


@pytest.mark.usefixtures("fresh_state")
def test_what_cannot_be_stepped_is_refused(two: Processes, tmp_path: Path) -> None:
    for stepped, missing, closure in two.run(refuse, str(tmp_path / "saved")):
        assert "before the first step" in stepped
        assert "the run that saved it stepped shards" in missing
        assert "step() without a closure" in closure


def muon_with_version_1() -> str:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
    model = network()
    with pytest.raises(NotOffered) as caught:
        accelerator.prepare(model, optimizers(model)[0])
    return str(caught.value)


@pytest.mark.usefixtures("fresh_state")
def test_a_backend_of_flat_pieces_refuses_muon(two: Processes) -> None:
    for message in two.run(muon_with_version_1):
        assert "flat pieces" in message
        assert "'fsdp2'" in message
