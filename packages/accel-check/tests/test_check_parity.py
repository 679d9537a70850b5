"""`accel check-parity`: real runs under a plan and alone, and what the comparison says of differences."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_state.errors import SettingError
from accel_testing.parity import check_parity
from accel_testing.processes import run_command
from accel_torch.check_parity import causes
from accel_torch.check_parity.comparison import compare_masks, compare_runs, remarks
from accel_torch.check_parity.notes import RunFacts, RunNotes, StepNotes, joined
from accel_torch.check_parity.tolerances import Tolerance, update_tolerance

pytestmark = pytest.mark.usefixtures("preloaded_python")
PRELOADED = ("accel_torch.accelerator",)

SCRIPT = str(Path(__file__).with_name("parity_script.py"))


def check(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "accel_cli.main", "check-parity", "--json", *arguments]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = run_command(command, timeout=280, env=environment)
    return finished.returncode, json.loads(finished.stdout) if finished.stdout else {}


def test_two_processes_compute_what_one_process_computes() -> None:
    code, report = check("--steps", "3", SCRIPT)
    assert (code, report["verdict"], report["steps"]) == (0, "equal", 3), report
    assert not report["findings"]


@pytest.mark.parametrize("kind", ["compiled", "sparse"])
def test_compiled_models_and_sparse_gradients_are_compared(kind: str) -> None:
    code, report = check("--steps", "2", SCRIPT, kind)
    assert (code, report["verdict"], report["steps"]) == (0, "equal", 2), report


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
    ("fault", "code", "reason"),
    [
        ("tokens", 1, "do not compute what one process computes"),
        ("alike", 1, "do not compute what one process computes"),
        ("clock", 3, "the script uses the clock (parity_script.py:"),
        ("rank", 3, "reads process_index (parity_script.py:"),
        ("unseeded", 3, "the script uses the generator of torch without a seed"),
        ("noise", 3, "draws random numbers in step 1 outside dropout"),
        ("unprepared", 3, "never calls accelerator.prepare() with a model"),
        ("unshared", 3, "does not train on a loader that accelerator.prepare() returned"),
    ],
)
def test_a_fault_of_the_script_is_named(fault: str, code: int, reason: str) -> None:
    found, report = check("--steps", "3", SCRIPT, fault)
    assert found == code, report
    assert reason in report["reason"]


@pytest.mark.parametrize(
    "arguments",
    [("--steps", "0", SCRIPT), ("no_such_script.py",), ("--backend", "depth=2", SCRIPT), ("--axes", "tp=two", SCRIPT)],
)
def test_what_cannot_be_checked_is_refused(arguments: tuple[str, ...]) -> None:
    assert check(*arguments)[0] == 2


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
    report = check_parity(train, batches(8, 8), processes=2)
    assert (report.verdict, report.steps) == ("equal", 2), report


def test_a_function_or_batches_that_cannot_be_sent_to_processes_are_refused() -> None:
    with pytest.raises(SettingError, match="at the top of a module"):
        check_parity(lambda accelerator, loader: None, batches(8))
    with pytest.raises(SettingError, match=r"batches of \[4, 8\] samples"):
        check_parity(train, batches(8, 4))


# ---------------------------------------------------------------- comparison


class Notes(RunNotes):
    """Notes that are in memory."""

    def __init__(self, ranks: list[list[StepNotes]], **facts: Any) -> None:
        usual = {"world": len(ranks), "data_count": len(ranks), "reads_loader": True}
        self.ranks = [RunFacts(**{"rank": rank, "data": rank, **usual, **facts}) for rank in range(len(ranks))]
        self._steps = ranks

    def step(self, rank: int, step: int) -> StepNotes | None:
        return self._steps[rank][step] if step < len(self._steps[rank]) else None

    @property
    def last_step(self) -> int:
        return min(map(len, self._steps)) - 1


WEIGHT = torch.linspace(-1, 1, 12).reshape(3, 4)
GRADIENT = torch.linspace(1, 2, 12).reshape(3, 4)


def notes(gradient: Tensor = GRADIENT, rate: float = 0.1, **more: Any) -> list[StepNotes]:
    """The state before a first step, and the step."""
    after = WEIGHT - rate * gradient
    step = StepNotes(1, gradients={"body.weight": gradient}, losses=[2.0], parameters={"body.weight": after})
    for name, value in more.items():
        setattr(step, name, value)
    step.modules = {"body": [1, 24, 3.0, 30.0, 8]}
    return [StepNotes(0, parameters={"body.weight": WEIGHT}), step]


def compared(*ranks: list[StepNotes], expected: list[StepNotes] | None = None, **facts: Any) -> list[Any]:
    halves = list(ranks)
    for rank in halves:
        rank[1].modules = {"body": [1, 12, 1.5, 15.0, 4]}
    return compare_runs(Notes(halves, **facts), Notes([expected or notes()]))


def test_equal_notes_differ_in_nothing() -> None:
    assert compared(notes(), notes()) == []


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
    (found,) = compared(*(notes(GRADIENT * factor) for factor in factors))
    assert (found.what, found.parameter, found.module) == ("gradient", "body.weight", "body")
    assert cause in found.cause
    assert found.ratio == pytest.approx(ratio)


def test_a_step_with_right_gradients_is_compared_by_its_update() -> None:
    (found,) = compared(notes(parameters={"body.weight": WEIGHT}), notes(parameters={"body.weight": WEIGHT}))
    assert (found.what, found.parameter) == ("parameter", "body.weight")
    assert "it is not updated" in found.cause
    (found,) = compared(notes(rate=0.2), notes(rate=0.2))
    assert found.ratio == pytest.approx(2.0)


def test_norms_of_shards_are_told_from_that_of_the_model() -> None:
    expected = notes(norms=[5.0])
    (found,) = compared(notes(norms=[3.0]), notes(norms=[4.0]), expected=expected)
    assert (found.what, found.detail) == ("norm", "3, 4 by process, one process 5")
    assert "the norm of its own shard" in found.cause


def test_a_buffer_is_named_before_the_outputs_that_it_changes() -> None:
    expected = notes(buffers={"body.scale": torch.ones(())})
    changed = notes(buffers={"body.scale": torch.zeros(())})
    changed[1].modules = {"body": [1, 12, 3.0, 30.0, 4]}
    first, second = compare_runs(Notes([changed, changed]), Notes([expected]))
    assert (first.what, first.parameter, second.what, second.module) == ("buffer", "body.scale", "output", "body")


def test_a_layer_that_normalises_over_its_own_samples_is_told_from_other_buffers() -> None:
    expected = notes(buffers={"norm.running_mean": torch.ones(2)})
    (found, *_) = compared(
        *(notes(buffers={"norm.running_mean": torch.full((2,), mean)}) for mean in (0.5, 1.5)), expected=expected
    )
    assert (found.what, found.parameter) == ("buffer", "norm.running_mean")
    assert "SyncBatchNorm" in found.cause


def test_processes_that_begin_differently_are_found_before_their_steps() -> None:
    other = notes()
    other[0].parameters = {"body.weight": WEIGHT + 1}
    (found,) = compared(notes(), other)
    assert (found.step, found.what, found.parameter) == (0, "parameter", "body.weight")
    assert "processes begin with different values" in found.cause


def test_a_number_that_is_not_finite_differs() -> None:
    (found, *_) = compared(notes(GRADIENT * float("nan")), notes())
    assert found.parameter == "body.weight"


@pytest.mark.parametrize(
    ("ours", "theirs", "facts", "cause"),
    [
        (["a", "b"], ["b", "a"], {}, "processes train on the same samples"),
        (["a", "b"], ["c", "d"], {"data": 0, "data_count": 1}, "read different ones"),
        (["c", "d"], ["a", "b"], {}, "reads other samples than one process would"),
    ],
)
def test_samples_are_compared(ours: list[str], theirs: list[str], facts: dict[str, Any], cause: str) -> None:
    expected = notes(samples=[(0, 0, ["a", "b"])])
    found = compared(notes(samples=[(0, 0, ours)]), notes(samples=[(0, 0, theirs)]), expected=expected, **facts)
    assert any(cause in one.cause for one in found), found


def read(*steps: list[str]) -> list[StepNotes]:
    """Notes of a process that read these samples, a batch a step."""
    return [StepNotes(0), *(StepNotes(step, samples=[(0, 0, ids)]) for step, ids in enumerate(steps, 1))]


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        # The data have four samples, twenty times each.
        ([["a", "b"], ["a", "c"]], [["a", "d"], ["b", "c"]], False),
        # Each process shuffles all data by its own seed.
        ([["a", "b"], ["c", "d"]], [["c", "a"], ["b", "e"]], True),
        # All processes read all data, with equal samples in it.
        ([["a", "b"], ["a", "c"]], [["a", "b"], ["a", "c"]], True),
    ],
)
def test_equal_samples_of_the_data_are_no_fault(first: list[list[str]], second: list[list[str]], shares: bool) -> None:
    found = compare_runs(Notes([read(*first), read(*second)]), Notes([read(*first)]))
    assert any("train on the same samples" in one.cause for one in found) is shares, found


def test_processes_that_read_a_loader_which_was_not_prepared_read_the_same_samples() -> None:
    (found,) = compared(notes(), notes(), reads_loader=False)
    assert (found.what, "was not returned by prepare()" in found.cause) == ("samples", True)


def mask(step: int, given: str, dropped: str) -> list[StepNotes]:
    return [StepNotes(number) for number in range(step)] + [
        StepNotes(step, masks=[[given, dropped, 0.1, 4096, "drop"]])
    ]


@pytest.mark.parametrize(
    ("ranks", "facts", "cause"),
    [
        ([("x", "m"), ("y", "n")], {}, None),
        ([("x", "m"), ("y", "m")], {}, "drop the same elements"),
        ([("x", "m"), ("x", "m")], {"data": 0}, None),
        ([("x", "m"), ("x", "n")], {"data": 0}, "drop different elements"),
        ([("x", "m"), ("y", "m")], {"data": 0}, "drop the same elements"),
    ],
)
def test_masks_of_dropout_differ_where_samples_do(
    ranks: list[tuple[str, str]], facts: dict[str, Any], cause: str | None
) -> None:
    found = compare_masks(Notes([mask(2, *one) for one in ranks], **facts))
    assert [(one.what, one.module) for one in found] == ([] if cause is None else [("dropout", "drop")])
    assert cause is None or cause in found[0].cause


def test_gradients_that_are_zero_and_losses_that_do_not_move_are_remarked() -> None:
    still = notes()
    alone = Notes([[*still, still[1]]], without_gradient=["head.bias"])
    assert remarks(alone, alone) == [
        "parameters without a gradient, or with a zero gradient: head.bias",
        "the loss does not change: it is [2.0] in every step",
    ]


def test_tolerances_grow_with_the_terms_and_the_rounding_of_each() -> None:
    few, many = Tolerance("no", {"a": 4.0, "b": 4096.0}), Tolerance("bf16", {"a": 4.0})
    assert few.relative(torch.float32, "a") < few.relative(torch.float32, "b") < 2e-4
    assert few.relative(torch.float32) == few.relative(torch.float32, "b")
    assert few.relative(torch.float64, "b") < 1e-12
    assert 0.01 < many.relative(torch.float32, "a") < 0.1


@pytest.mark.parametrize(
    ("precision", "rows", "factor", "differs"),
    [
        ("bf16", 2, 1.4, False),
        ("no", 2, 1.4, True),
        ("bf16", 30, 1.4, True),
        ("bf16", 2, 3.0, True),
        ("bf16", 2, float("nan"), True),
    ],
)
def test_single_units_of_mixed_precision_may_have_another_sign(
    precision: str, rows: int, factor: float, differs: bool
) -> None:
    expected = torch.linspace(1, 2, 120).reshape(30, 4)
    changed = expected.clone()
    changed[:rows] *= factor
    start = StepNotes(0, parameters={"body.weight": torch.zeros(30, 4)})
    steps = [
        StepNotes(1, gradients={"body.weight": one}, losses=[2.0], parameters={"body.weight": -0.1 * one})
        for one in (expected, changed)
    ]
    found = compare_runs(Notes([[start, steps[1]]] * 2, precision=precision), Notes([[start, steps[0]]]))
    assert bool(found) is differs, found


def test_an_update_may_differ_as_much_as_its_gradient_does() -> None:
    before, gradient = torch.zeros(3), torch.tensor([1.0, 1e-3, 1e-9])
    after = torch.tensor([-0.1, -0.1, 0.1])
    allowed = update_tolerance(before, after, gradient, 1e-6, 1e-6)
    assert allowed[0] < 1e-5 < allowed[1] < 1e-3
    assert allowed[2] > 0.2


def test_slices_of_a_batch_are_joined() -> None:
    one = {"inputs": torch.ones(2, 3), "texts": ["a", "b"], "pair": (torch.zeros(2), torch.tensor(1))}
    made = joined([one, one])
    assert made["inputs"].shape == (4, 3)
    assert made["texts"] == ["a", "b", "a", "b"]
    assert made["pair"][0].shape == (4,)
    with pytest.raises(RuntimeError):
        joined([torch.ones(2, 3), torch.ones(2, 4)])


def test_a_permuted_shard_is_told_from_another_start() -> None:
    assert "in another order" in causes.cause_of_start([WEIGHT.flip(0)] * 2, WEIGHT)
    assert "begin with other values" in causes.cause_of_start([WEIGHT * 2] * 2, WEIGHT)
