"""Every combination of axes trains like one process, wraps in a fixed order and makes a known number of collectives."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_plugins import order
from accel_plugins.ddp.manifest import MANIFEST as DDP
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.manifest import FSDP2
from accel_plugins.manifest import Axis, Manifest
from accel_plugins.mesh_rules import PERMITTED, takes
from accel_plugins.testing import Case, Processes, Session, fresh
from accel_plugins.transform import Transform
from accel_plugins.transforms.activation_checkpoint import ActivationCheckpoint
from accel_plugins.transforms.compile import Compile
from accel_plugins.transforms.compile_config import TorchDynamoPlugin
from accel_plugins.transforms.divided_sequence import divide
from accel_plugins.transforms.tensor_parallel import TensorParallel
from accel_state import PartialState, current
from accel_state.mesh import ParallelismConfig
from accel_state.testing.processes import Processes as Group

HEADS, WIDTH, LENGTH, SAMPLES, STEPS = 4, 8, 8, 4, 3
SHARDED = FullyShardedDataParallelPlugin(
    2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"]
)
PLAN = {
    "blocks.*.queries": "colwise",
    "blocks.*.keys": "colwise",
    "blocks.*.values": "colwise",
    "blocks.*.out": "rowwise",
}


@pytest.fixture(scope="module")
def two() -> Iterator[Group]:
    with Processes(2) as group:
        yield group


@pytest.fixture(scope="module")
def four() -> Iterator[Group]:
    with Processes(4) as group:
        yield group


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh():
        monkeypatch.setenv("ACCELERATE_ALLOW_CP_STANDALONE", "true")
        yield


class Block(nn.Module):
    """Causal attention of several heads; the number of heads is read from the projections, as some may be elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        normal = self.norm(inputs)
        projected = (self.queries(normal), self.keys(normal), self.values(normal))
        heads = [one.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in projected]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        out: Tensor = inputs + self.out(attended.transpose(1, 2).flatten(2))
        return out


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        out: Tensor = self.head(inputs)
        return out


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(21)
    return [
        (
            torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator),
            torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator),
        )
        for _ in range(STEPS)
    ]


def reference(clip: float | None) -> dict[str, Any]:
    """The same training in one process, in plain torch."""
    model = Tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses, norms = [], []
    for inputs, targets in data():
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": {n: v.tolist() for n, v in model.state_dict().items()}}


def case_of(manifest: Manifest, axes: frozenset[Axis], size: int = 2, *more: Transform) -> Case:
    sizes: dict[str, Any] = {f"{axis.value}_size": size for axis in axes}
    if Axis.SEQUENCE in axes:
        sizes["sp_backend"] = "torch"
    transforms = (TensorParallel(PLAN), *more) if Axis.TENSOR in axes else more
    config = SHARDED if manifest is FSDP2 else None
    arranged = ParallelismConfig(**sizes) if sizes else None
    return Case(manifest, config, arranged=arranged, transforms=transforms)


def train(case: Case, clip: float | None) -> dict[str, Any]:
    session = Session(case, Tokens())
    losses, norms = [], []
    for batch in data():
        inputs, targets = session.slice(batch)
        with divide(session.strategy.context, [inputs, targets], [1, 1]):
            loss = nn.functional.mse_loss(session.model(inputs), targets)
            session.strategy.backward(loss)
        if clip is not None:
            norm: Any = session.strategy.clip_norm(list(session.model.parameters()), clip)
            norms.append(float(norm))
        session.step()
        losses.append(session.mean(loss.item()))
    return {"losses": losses, "norms": norms, "weights": session.weights()}


def near(expected: Any) -> Any:
    if isinstance(expected, dict):
        return {name: near(value) for name, value in expected.items()}
    if expected and isinstance(expected[0], list):
        return [near(value) for value in expected]
    return pytest.approx(expected, rel=2e-4, abs=2e-5)


COMBINATIONS = [
    pytest.param(
        manifest, combination.axes, id=f"{manifest.name}-{'-'.join(sorted(a.value for a in combination.axes))}"
    )
    for combination in PERMITTED
    for manifest in (DDP, FSDP2)
    if takes(manifest, combination.axes) and len(combination.axes) <= 2
]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(("manifest", "axes"), COMBINATIONS)
def test_losses_and_weights_are_those_of_one_process(
    four: Group, manifest: Manifest, axes: frozenset[Axis], clip: float | None
) -> None:
    expected = reference(clip)
    answers = four.run(train, case_of(manifest, axes, 4 if len(axes) == 1 else 2), clip)
    for answer in answers:
        assert answer["losses"] == near(expected["losses"])
        assert answer["norms"] == (near(expected["norms"]) if clip else [])
    assert answers[0]["weights"] == near(expected["weights"])


@pytest.mark.slow
def test_copies_of_divided_tensors_and_parameters() -> None:
    expected = reference(0.05)
    axes = frozenset({Axis.REPLICATE, Axis.SHARD, Axis.TENSOR})
    with Processes(8) as eight:
        for answer in eight.run(train, case_of(FSDP2, axes), 0.05):
            assert answer["losses"] == near(expected["losses"])
            assert answer["norms"] == near(expected["norms"])


# ------------------------------------------------------------------------------ order


def names_of_steps(case: Case) -> list[str]:
    session = Session(case, Tokens())
    return [step.name for step in order.steps(case.manifest, session.strategy, case.transforms)]


WHOLE = Compile(TorchDynamoPlugin(backend="eager"))
BLOCKS = Compile(TorchDynamoPlugin(backend="eager", use_regional_compilation=True))
TP, CHECKPOINT = "tensor parallelism", "activation checkpointing"


class Recording(TorchDispatchMode):
    """Counts the collectives that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not func._opname.strip("_").startswith(("wait", "wrap")):
            self.counts[func._opname.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(case: Case) -> dict[str, int]:
    session = Session(case, Tokens())
    inputs, targets = session.slice(data()[0])

    def step() -> None:
        with divide(session.strategy.context, [inputs, targets], [1, 1]):
            session.strategy.backward(nn.functional.mse_loss(session.model(inputs), targets))
        session.step()

    step()
    step()
    with Recording() as recording:
        step()
    return dict(recording.counts)


DATA_PARALLEL = {"allreduce": 1}
"""One bucket; every parameter fits in."""
SHARDED_BY_BLOCK = {"allgather_base": 6, "reduce_scatter_base": 3}
"""Two blocks and the rest: gathered for forward and backward, and reduced once."""
IN_COPIES = {"allreduce": 3}
GATHERED_KEYS = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
"""One for keys and values of each block, and its backward."""
EXCHANGED_HEADS = {"all_to_all_single": 8}
"""Two for each block, and their backwards."""
DIVIDED_LAYERS = {"all_reduce": 8}
"""For each block one after the last layer in forward, and one for each of the three first in backward."""
R, S, C, Q, T = (Axis.REPLICATE, Axis.SHARD, Axis.CONTEXT, Axis.SEQUENCE, Axis.TENSOR)

COLLECTIVES: list[tuple[Manifest, tuple[Axis, ...], dict[str, int]]] = [
    (DDP, (), DATA_PARALLEL),
    (DDP, (R,), DATA_PARALLEL),
    (DDP, (C,), DATA_PARALLEL | GATHERED_KEYS),
    (DDP, (R, C), DATA_PARALLEL | GATHERED_KEYS),
    (DDP, (Q,), DATA_PARALLEL | EXCHANGED_HEADS),
    (DDP, (R, Q), DATA_PARALLEL | EXCHANGED_HEADS),
    (FSDP2, (), SHARDED_BY_BLOCK),
    (FSDP2, (S,), SHARDED_BY_BLOCK),
    (FSDP2, (R, S), SHARDED_BY_BLOCK | IN_COPIES),
    (FSDP2, (T,), DIVIDED_LAYERS),
    (FSDP2, (S, T), SHARDED_BY_BLOCK | DIVIDED_LAYERS),
    (FSDP2, (C,), SHARDED_BY_BLOCK | GATHERED_KEYS),
    (FSDP2, (R, C), SHARDED_BY_BLOCK | IN_COPIES | GATHERED_KEYS),
    (FSDP2, (S, C), SHARDED_BY_BLOCK | GATHERED_KEYS),
    (FSDP2, (Q,), SHARDED_BY_BLOCK | EXCHANGED_HEADS),
    (FSDP2, (R, Q), SHARDED_BY_BLOCK | IN_COPIES | EXCHANGED_HEADS),
    (FSDP2, (S, Q), SHARDED_BY_BLOCK | EXCHANGED_HEADS),
]


@pytest.mark.parametrize(("manifest", "axes", "expected"), COLLECTIVES)
def test_a_step_makes_a_known_number_of_collectives(
    four: Group, manifest: Manifest, axes: tuple[Axis, ...], expected: dict[str, int]
) -> None:
    case = case_of(manifest, frozenset(axes), 4 if len(axes) == 1 else 2)

    assert four.run(collectives_of_a_step, case) == [expected] * 4


@pytest.mark.parametrize(
    ("manifest", "axes", "more", "expected"),
    [
        (DDP, (), (), ["precision no", "ddp"]),
        (DDP, (R, C), (WHOLE, ActivationCheckpoint()), [CHECKPOINT, "precision no", "ddp", "compile"]),
        (DDP, (R, Q), (BLOCKS, ActivationCheckpoint()), [CHECKPOINT, "compile", "precision no", "ddp"]),
        (FSDP2, (S,), (WHOLE,), ["precision no", "fsdp2", "compile"]),
        (FSDP2, (R, S), (BLOCKS,), ["compile", "precision no", "fsdp2"]),
        (FSDP2, (T,), (BLOCKS,), [TP, "compile", "precision no", "fsdp2"]),
        (FSDP2, (S, T), (WHOLE, ActivationCheckpoint()), [TP, CHECKPOINT, "precision no", "fsdp2", "compile"]),
        (FSDP2, (S, T), (ActivationCheckpoint(), BLOCKS), [TP, CHECKPOINT, "compile", "precision no", "fsdp2"]),
        (FSDP2, (S, C), (ActivationCheckpoint(),), [CHECKPOINT, "precision no", "fsdp2"]),
    ],
)  # fmt: skip
def test_models_are_wrapped_in_a_fixed_order(
    four: Group, manifest: Manifest, axes: tuple[Axis, ...], more: tuple[Transform, ...], expected: list[str]
) -> None:
    case = case_of(manifest, frozenset(axes), 4 if len(axes) == 1 else 2, *more)

    assert four.run(names_of_steps, case) == [["place", *expected]] * 4


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("manifest", "axes"), [(DDP, (R, C)), (FSDP2, (S, T)), (FSDP2, (S, Q))])
def test_blocks_may_be_recomputed_under_any_division(
    four: Group, manifest: Manifest, axes: tuple[Axis, ...], offload: bool
) -> None:
    answers = four.run(train, case_of(manifest, frozenset(axes), 2, ActivationCheckpoint(offload=offload)), None)

    assert answers[0]["losses"] == near(reference(None)["losses"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("manifest", "axes"), [(DDP, (R, C)), (FSDP2, (S, T)), (FSDP2, (S, C)), (FSDP2, (R, Q))])
def test_mixed_precision_stays_near_it(four: Group, manifest: Manifest, axes: tuple[Axis, ...], precision: str) -> None:
    answers = four.run(train, case_of(manifest, frozenset(axes)).but(precision=precision), None)

    assert answers[0]["losses"] == pytest.approx(reference(None)["losses"], rel=0.05)


# -------------------------------------------------------------- weights and checkpoints


def load_from_first(case: Case) -> dict[str, Any]:
    PartialState(cpu=True)
    model = Tokens() if current.process().rank == 0 else Tokens().to("meta")
    return Session(case, model).weights()


def test_only_the_first_process_has_to_load_weights_that_are_divided_twice(four: Group) -> None:
    config = dataclasses.replace(SHARDED, cpu_ram_efficient_loading=True)
    weights = four.run(load_from_first, case_of(FSDP2, frozenset({S, T})).but(config=config))[0]

    assert weights == {name: value.tolist() for name, value in Tokens().state_dict().items()}


def save(case: Case, folder: str) -> list[float]:
    session = Session(case, Tokens())
    steps(session)
    session.save(Path(folder))
    return steps(session)


def resume(case: Case, folder: str) -> list[float]:
    session = Session(case, Tokens())
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.zero_()
    session.load(Path(folder))
    return steps(session)


def steps(session: Session) -> list[float]:
    losses = []
    for batch in data():
        inputs, targets = session.slice(batch)
        with divide(session.strategy.context, [inputs, targets], [1, 1]):
            loss = nn.functional.mse_loss(session.model(inputs), targets)
            session.strategy.backward(loss)
        session.step()
        losses.append(session.mean(loss.item()))
    return losses


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize(("axes", "others"), [((S, T), (R, S)), ((T,), (S, T)), ((R, S), (S, C))])
def test_a_checkpoint_loads_on_other_axes(
    four: Group, tmp_path: Path, kind: str, axes: tuple[Axis, ...], others: tuple[Axis, ...]
) -> None:
    config = dataclasses.replace(SHARDED, state_dict_type=kind)
    first, second = (
        case_of(FSDP2, frozenset(names), 4 if len(names) == 1 else 2).but(config=config, adam=True)
        for names in (axes, others)
    )
    expected = four.run(save, first, str(tmp_path))

    assert four.run(resume, first, str(tmp_path)) == [near(losses) for losses in expected]
    assert four.run(resume, second, str(tmp_path)) == [near(losses) for losses in expected]
