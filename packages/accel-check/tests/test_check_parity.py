"""`accel check-parity`: real runs under a plan and alone, and what the comparison says of differences."""

from __future__ import annotations

import json
import os
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn

import accel_check
import accel_check.started
from accel_check import causes
from accel_check.batches import join_shards
from accel_check.comparison import Limits, compare_runs, remarks
from accel_check.records import OutputSums, RankFacts, Records, StartRecord, StepRecord, TensorPart, values_of
from accel_state.errors import SettingError
from accel_testing.processes import run_command

pytestmark = pytest.mark.usefixtures("preloaded_python")
PRELOADED = ("accel_torch.accelerator", "accel_check.comparison", "accel_check.recorder")

SCRIPT = str(Path(__file__).with_name("parity_script.py"))


def check(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, str(accel_check.started.__file__), "check-parity", "--json", *arguments]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = run_command(command, timeout=280, env=environment)
    report = json.loads(finished.stdout) if finished.stdout else {}
    if report:
        schema = files("accel_check").joinpath("schemas", "check-parity.json").read_text(encoding="utf-8")
        jsonschema.validate(report, json.loads(schema))
    return finished.returncode, report


def test_two_processes_compute_what_one_process_computes() -> None:
    code, report = check("--steps", "3", SCRIPT)
    assert (code, report["verdict"], report["steps"]) == (0, "equal", 3), report
    assert not report["findings"]


@pytest.mark.parametrize("kind", ["compiled", "sparse"])
def test_compiled_models_and_sparse_gradients_are_compared(kind: str) -> None:
    code, report = check("--steps", "2", SCRIPT, kind)
    assert (code, report["verdict"], report["steps"]) == (0, "equal", 2), report


@pytest.mark.parametrize("kind", ["tensors", "shards"])
def test_models_that_arrive_distributed_compute_what_one_process_computes(kind: str) -> None:
    code, report = check("--steps", "3", str(Path(__file__).with_name("distributed_script.py")), kind)
    assert (code, report["verdict"], report["steps"]) == (0, "equal", 3), report


def test_a_loss_that_is_a_sum_is_found_with_its_ratio() -> None:
    code, report = check("--steps", "2", SCRIPT, "sum")
    assert code == 1, report
    assert [(one["what"], one["step"], one["ratio"]) for one in report["findings"][:2]] == [
        ("loss", 1, pytest.approx(0.5, rel=1e-4)),
        ("gradient", 1, pytest.approx(0.5, rel=1e-4)),
    ]
    assert (report["parameter"], report["module"]) == ("0.weight", "0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("tokens", 1, "its own number of tokens"),
        ("alike", 1, "draw the same masks of dropout"),
        ("clock", 0, "compute what one process computes"),
        ("rank", 1, "do not compute what one process computes"),
        ("unseeded", 0, "compute what one process computes"),
        ("noise", 3, "draws random numbers in step 1 outside dropout"),
        ("unprepared", 3, "trains no model"),
        ("unshared", 1, "train on the same samples"),
    ],
)
def test_a_fault_of_the_script_is_named(fault: str, code: int, text: str) -> None:
    found, report = check("--steps", "3", SCRIPT, fault)
    assert found == code, report
    assert text in json.dumps(report)


@pytest.mark.parametrize(
    "arguments",
    [("--steps", "0", SCRIPT), ("no_such_script.py",), ("--backend", "depth=2", SCRIPT), ("--axes", "tp=two", SCRIPT)],
)
def test_what_cannot_be_checked_is_refused(arguments: tuple[str, ...]) -> None:
    assert check(*arguments)[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("stretched", "code"), [(True, 0), (False, 1)])
def test_a_schedule_is_equal_if_it_is_stretched_by_the_number_of_processes(
    stretched: bool, code: int, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCHEDULED.format(warm="10 * a.num_processes" if stretched else "10"), encoding="utf-8")
    found, report = check("--steps", "3", str(script))
    assert found == code, report
    assert [one["what"] for one in report["findings"][:1]] == ([] if stretched else ["learning rate"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "cause"),
    [
        ("torch.manual_seed(5)", "different samples draw the same masks"),
        ("torch.manual_seed(5 + accelerator.process_index)", "share samples draw different masks"),
        ("torch.manual_seed(5 + accelerator.data_parallel_shard_rank)", None),
    ],
)
def test_seeds_of_dropout_are_right_by_data_shard_alone(seed: str, cause: str | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DIVIDED.format(seed=seed), encoding="utf-8")
    code, report = check("--steps", "2", "--axes", "dp_shard=2,tp=2", str(script))
    assert code == (0 if cause is None else 1), report
    assert [cause in one["cause"] for one in report["findings"] if cause] == ([] if cause is None else [True])


SCHEDULED = """
import torch
from accel_torch import Accelerator, set_seed
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
a = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
warm = {warm}
sch = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 10 * warm // 100) / warm))
x = torch.randn(256, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model, opt, sch, loader = a.prepare(model, opt, sch, loader)
for x, y in loader:
    a.backward((model(x) - y).square().mean())
    opt.step()
    sch.step()
    opt.zero_grad()
"""

DIVIDED = """
import torch
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, TorchTensorParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head, self.drop = nn.Linear(6, 16), nn.Linear(16, 32), nn.Linear(32, 2), nn.Dropout()

    def forward(self, x):
        return self.head(self.drop(self.down(torch.tanh(self.up(x)))))


accelerator = Accelerator(
    cpu=True,
    fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap"),
    torch_tp_plugin=TorchTensorParallelPlugin(parallelize_plan={{"up": "colwise", "down": "rowwise"}}),
)
torch.manual_seed(3)
model = Net()
{seed}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
"""

# ---------------------------------------------------------------- in a test


def train(accelerator: Any, loader: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs, targets in loader:
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(2, (size,), generator=generator)) for size in sizes
    ]


def test_a_function_of_a_test_is_checked() -> None:
    report = accel_check.parity(train, batches(8, 8), processes=2)
    assert (report.verdict, report.steps) == ("equal", 2), report


def test_a_function_or_batches_that_cannot_be_sent_to_processes_are_refused() -> None:
    with pytest.raises(SettingError, match="at the top of a module"):
        accel_check.parity(lambda accelerator, loader: None, batches(8))
    with pytest.raises(SettingError, match=r"batches of \[4, 8\] samples"):
        accel_check.parity(train, batches(8, 4))


@pytest.mark.slow
def test_a_function_of_a_test_is_resumed() -> None:
    (outcome,) = accel_check.resume(train, batches(8, 8, 8), at=(1,), steps=1, processes=(2,))
    assert outcome.verdict == "equal", outcome


# ---------------------------------------------------------------- comparison


class InMemory(Records):
    """Records that are in memory."""

    def __init__(self, starts: list[StartRecord], ranks: list[list[StepRecord]], **facts: Any) -> None:
        self.ranks = [
            RankFacts(**{"rank": rank, "world": len(ranks), "alike": (rank,), **facts}) for rank in range(len(ranks))
        ]
        self._starts, self._steps = starts, ranks

    def step(self, rank: int, index: int) -> StepRecord:
        return self._steps[rank][index - 1]

    @property
    def calls(self) -> int:
        return min(map(len, self._steps))

    def start(self) -> list[StartRecord]:
        return self._starts


WEIGHT = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
GRADIENT = torch.linspace(1, 2, 12, dtype=torch.float64).reshape(3, 4)


def whole(tensor: Tensor) -> dict[str, TensorPart]:
    return {"body.weight": TensorPart(tensor, tuple(tensor.shape))}


def step(gradient: Tensor = GRADIENT, rate: float = 0.1, rows: float = 4, **more: Any) -> StepRecord:
    """The first step of a rank."""
    after = whole(WEIGHT - rate * gradient)
    record = StepRecord(0, 1, losses=[2.0], gradients=whole(gradient), parameters=after, rates=[0.1])
    record.outputs = {"body": OutputSums(1, int(3 * rows), 0.375 * rows, 3.75 * rows)}
    for name, value in more.items():
        setattr(record, name, value)
    return record


def compared(*ranks: StepRecord, expected: StepRecord | None = None, **facts: Any) -> list[Any]:
    starts = [StartRecord(whole(WEIGHT)) for _ in ranks]
    one = InMemory(starts[:1], [[expected or step(rows=8)]])
    return compare_runs(InMemory(starts, [[rank] for rank in ranks], **facts), one, Limits(1e-7, 1e-5))


def test_equal_records_differ_in_nothing() -> None:
    assert compared(step(), step()) == []


@pytest.mark.parametrize(
    ("factors", "ratio", "cause"),
    [
        ((2, 2), 2.0, "added over the processes of data parallelism, and not averaged"),
        ((0.5, 0.5), 0.5, "averaged twice"),
        ((0.0, 0.0), 0.0, "the gradient is zero"),
        ((-1, -1), -1.0, "its sign is wrong"),
        ((0.5, 1.5), 0.5, "not averaged over the processes of data parallelism"),
        ((0.3, 0.7), 0.3, "not added over the processes of data parallelism"),
        ((1.0, 1.5), 1.5, "processes 1 change it"),
    ],
)
def test_the_ratio_of_gradients_says_why_they_differ(factors: tuple[float, float], ratio: float, cause: str) -> None:
    (found,) = compared(*(step(GRADIENT * factor) for factor in factors))
    assert (found.what, found.parameter, found.module) == ("gradient", "body.weight", "body")
    assert cause in found.cause
    assert found.ratio == pytest.approx(ratio)


def test_gradients_inside_no_sync_are_named_by_it() -> None:
    (found,) = compared(*(step(GRADIENT * factor, unsynchronised=[False, True]) for factor in (0.5, 1.5)))
    assert "no_sync()" in found.cause


def test_a_step_with_right_gradients_is_compared_by_its_update() -> None:
    (found,) = compared(*(step(parameters=whole(WEIGHT)) for _ in range(2)))
    assert (found.what, found.parameter) == ("parameter", "body.weight")
    assert "it is not updated" in found.cause
    (found,) = compared(step(rate=0.2), step(rate=0.2))
    assert found.ratio == pytest.approx(2.0)


def test_norms_of_shards_are_told_from_that_of_the_model() -> None:
    (found,) = compared(step(norms=[3.0]), step(norms=[4.0]), expected=step(rows=8, norms=[5.0]))
    assert (found.what, found.detail) == ("norm", "3, 4 by process, one process 5")
    assert "the norm of its own shard" in found.cause


def test_a_shard_that_is_scaled_by_its_own_norm_is_named() -> None:
    def shard(factor: float, begin: int, rows: int) -> StepRecord:
        part = GRADIENT[begin : begin + rows]
        before = {"body.weight": TensorPart(part, (3, 4), (begin, 0))}
        after = {"body.weight": TensorPart(part * factor, (3, 4), (begin, 0))}
        return step(gradients=after, after_backward=before)

    expected = step(GRADIENT * 0.5, rows=8, after_backward=whole(GRADIENT))
    (found,) = compared(shard(0.6, 0, 2), shard(0.7, 2, 1), expected=expected)
    assert (found.what, found.detail) == ("norm", "gradients are scaled by 0.6, 0.7")


def test_a_rate_that_differs_is_named() -> None:
    (found, *_) = compared(step(rates=[0.2]), step(rates=[0.2]))
    assert (found.what, found.ratio) == ("learning rate", pytest.approx(2.0))


def test_a_buffer_is_named_before_the_outputs_that_it_changes() -> None:
    def scaled(value: float, total: float, rows: int) -> StepRecord:
        buffers = {"body.scale": TensorPart(torch.full((), value), ())}
        return step(buffers=buffers, outputs={"body": OutputSums(1, 3 * rows, total, 3.75 * rows)})

    first, second = compared(scaled(0.0, 9.0, 4), scaled(0.0, 9.0, 4), expected=scaled(1.0, 3.0, 8))
    assert (first.what, first.parameter, second.what, second.module) == ("buffer", "body.scale", "output", "body")


def test_a_layer_that_normalises_over_its_own_samples_is_told_from_other_buffers() -> None:
    def mean(value: float, rows: int = 4) -> StepRecord:
        return step(buffers={"norm.running_mean": TensorPart(torch.full((2,), value), (2,))}, rows=rows)

    (found,) = compared(mean(0.5), mean(1.5), expected=mean(1.0, 8))
    assert (found.what, found.parameter) == ("buffer", "norm.running_mean")
    assert "SyncBatchNorm" in found.cause


def test_processes_that_begin_differently_are_found_before_their_steps() -> None:
    starts = [StartRecord(whole(WEIGHT)), StartRecord(whole(WEIGHT + 1))]
    several, one = InMemory(starts, [[step()], [step()]]), InMemory(starts[:1], [[step(rows=8)]])
    (found,) = compare_runs(several, one, Limits(1e-7, 1e-5))
    assert (found.step, found.what, found.parameter, found.ranks) == (0, "parameter", "body.weight", (1,))
    assert "different initial weights" in found.cause


def test_a_permuted_shard_is_told_from_another_start() -> None:
    def found(values: Tensor) -> list[str]:
        starts = [StartRecord(whole(values)) for _ in range(2)]
        several = InMemory(starts, [[step(parameters=whole(values - 0.1 * GRADIENT))]] * 2)
        one = InMemory([StartRecord(whole(WEIGHT))], [[step(rows=8, parameters=whole(values - 0.1 * GRADIENT))]])
        return [one.cause for one in compare_runs(several, one, Limits(1e-7, 1e-5))]

    assert "in another order" in found(WEIGHT.flip(0))[0]
    assert found(WEIGHT * 2) == []


def test_a_number_that_is_not_finite_differs() -> None:
    (found, *_) = compared(step(GRADIENT * float("nan")), step())
    assert found.parameter == "body.weight"
    (found, *_) = compared(step(GRADIENT * float("nan")), step(GRADIENT * float("nan")))
    assert found.parameter == "body.weight"


@pytest.mark.parametrize(
    ("ours", "theirs", "alike", "cause"),
    [
        (["a", "b"], ["b", "a"], None, "processes train on the same samples"),
        (["a", "b"], ["c", "d"], (0, 1), "read different ones"),
        (["a", "b"], ["c", "b"], None, None),
        (["a", "b"], ["a", "b"], (0, 1), None),
    ],
)
def test_samples_are_compared(
    ours: list[str], theirs: list[str], alike: tuple[int, ...] | None, cause: str | None
) -> None:
    facts: dict[str, Any] = {} if alike is None else {"alike": alike}
    ranks = [step(samples=[ids], feeds=["train.py:1"]) for ids in (ours, theirs)]
    found = [one.cause for one in compared(*ranks, **facts) if one.what == "samples"]
    assert [cause in one for one in found if cause] == ([] if cause is None else [True])
    assert bool(found) is (cause is not None)


@pytest.mark.parametrize(
    ("states", "alike", "cause"),
    [
        (("m", "n"), None, None),
        (("m", "m"), None, "draw the same masks"),
        (("m", "m"), (0, 1), None),
        (("m", "n"), (0, 1), "draw different masks"),
    ],
)
def test_generators_of_dropout_differ_where_samples_do(
    states: tuple[str, str], alike: tuple[int, ...] | None, cause: str | None
) -> None:
    facts: dict[str, Any] = {"shards_known": True} | ({} if alike is None else {"alike": alike})
    found = compared(*(step(dropout=("drop", state)) for state in states), **facts)
    assert [(one.what, one.module) for one in found] == ([] if cause is None else [("dropout", "drop")])
    assert cause is None or cause in found[0].cause


def test_zero_gradients_still_losses_and_double_divisions_are_remarked() -> None:
    still = [step(GRADIENT * 0, losses=[1.0, 1.0], divisors=[4.0, 4.0])] * 2
    alone = InMemory([StartRecord(whole(WEIGHT))], [still])
    zero, divided, loss = remarks(alone, alone)
    assert zero == "parameters without a gradient, or with a zero gradient: body.weight"
    assert "divided by 4 with 2 micro-batches" in divided
    assert loss == "the loss does not change: it is [1.0, 1.0] in every step"


def test_limits_follow_the_narrowest_numbers() -> None:
    wide, single, half = (Limits.of({dtype}, False) for dtype in (torch.float64, torch.float32, torch.bfloat16))
    assert wide.gradient < 1e-6 < single.gradient < 1e-3 < half.gradient < 0.1
    assert Limits.of({torch.float32}, True) == half


def test_elements_whose_gradient_is_rounding_may_move_anywhere() -> None:
    gradient = GRADIENT.clone()
    gradient[0] = 1e-12
    after = WEIGHT - 0.1 * gradient
    moved = after.clone()
    moved[0] += 0.1
    ranks = [step(gradient, parameters=whole(moved)) for _ in range(2)]
    assert compared(*ranks, expected=step(gradient, rows=8, parameters=whole(after))) == []
    moved[1] += 0.1
    (found,) = compared(*(step(gradient, parameters=whole(moved)) for _ in range(2)), expected=step(gradient, rows=8))
    assert found.what == "parameter"


def test_parts_of_all_ranks_make_a_tensor() -> None:
    parts = [TensorPart(WEIGHT[:2], (3, 4), (0, 0)), TensorPart(WEIGHT[2:], (3, 4), (2, 0)), None]
    (made,) = values_of(parts)
    assert made is not None
    assert torch.equal(made, WEIGHT)
    assert len(values_of([*parts, TensorPart(WEIGHT[2:] + 1, (3, 4), (2, 0))])) == 2


def test_slices_of_a_batch_are_joined() -> None:
    one = {"inputs": torch.ones(2, 3), "texts": ["a", "b"], "pair": (torch.zeros(2), torch.tensor(1))}
    made = join_shards([one, one])
    assert made["inputs"].shape == (4, 3)
    assert made["texts"] == ["a", "b", "a", "b"]
    assert made["pair"][0].shape == (4,)
    with pytest.raises(RuntimeError):
        join_shards([torch.ones(2, 3), torch.ones(2, 4)])


def test_a_bias_that_each_process_adds_is_named() -> None:
    bias = torch.tensor([1.0, -2.0], dtype=torch.float64)

    def outputs(rows: int, times: int) -> StepRecord:
        sums = OutputSums(1, 2 * rows, float(rows * times * bias.sum()), float(rows * (times * bias).square().sum()))
        sums.features = rows * times * bias
        return StepRecord(0, 1, outputs={"down": sums}, gradients=whole(GRADIENT * times), parameters=whole(WEIGHT))

    start = StartRecord({"down.bias": TensorPart(bias, (2,)), **whole(WEIGHT)})
    several = InMemory([start, start], [[outputs(4, 2)], [outputs(4, 2)]], alike=(0, 1))
    found = compare_runs(several, InMemory([start], [[outputs(4, 1)]]), Limits(1e-7, 1e-5))
    assert "down.bias is added twice" in found[0].cause


def test_a_ratio_of_zero_has_no_direction() -> None:
    assert causes.likeness(torch.zeros(2), torch.ones(2)).is_multiple
    assert causes.likeness(torch.ones(2), torch.zeros(2)).ratio == float("inf")
