"""Planted faults of parallel training, for `accel check-parity` to find.

`train(plan)` trains a small model with tied weights, on padded sequences, under one of `PLANS`; two processes compute
what one computes. An entry plants its fault into that run, or into any other that trains a `TinyModel` through the
Accelerator, on every process of the parallel run and never in the run of one process:

    bug = CATALOGUE["ddp_sum_for_mean"]
    with bug.planted():
        train(bug.plan)

Gradients and parameters have their names in the user's model. A ratio is what is found, divided by what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accel_torch import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
)

__all__ = ("CATALOGUE", "PLANS", "ParallelismBug", "TinyModel", "Trace", "settings", "train")

PLANS: Final = ("one", "ddp", "fsdp2", "tp")
"""Plans of `train`: "one" is for one process, the others for two."""

_VOCABULARY: Final = 16
_WIDTH: Final = 8


# ---------------------------------------------------------------- the run


class Block(nn.Module):
    """Adds an expansion of its inputs to them, scaled by a buffer that shrinks with each training step."""

    scale: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.scale = self.scale * 0.9
        added: Tensor = self.dropout(self.down(self.up(self.norm(inputs)).relu()))
        return inputs + self.scale * added


class TinyModel(nn.Module):
    """Predicts tokens; the embedding and the head are one weight."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


@dataclass
class Trace:
    """What a run computed, by step: losses, norms, and by name gradients before clipping, and weights."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: list[dict[str, Tensor]]


def settings(plan: str) -> dict[str, Any]:
    """Arguments of the Accelerator for a plan."""
    arguments: dict[str, Any] = {"cpu": True, "dataloader_config": DataLoaderConfiguration(split_batches=True)}
    if plan == "fsdp2":
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"]
        )
    if plan == "tp":
        arguments["parallelism_config"] = ParallelismConfig(tp_size=2)
        arguments["torch_tp_plugin"] = TorchTensorParallelPlugin(
            parallelize_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        )
    return arguments


def samples() -> Tensor:
    """Sequences of different lengths, filled up with zeros; short ones first in each batch of eight."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, _VOCABULARY, (32, 6), generator=generator)
    lengths = torch.arange(32) % 8 // 2 + 3
    return tokens * (torch.arange(6) < lengths[:, None])


def train(plan: str, steps: int = 4, dropout: float = 0.0) -> Trace:
    """Train by a plan; called on every process."""
    accelerator = Accelerator(**settings(plan))
    torch.manual_seed(accelerator.process_index)
    model = TinyModel(dropout)
    model.load_state_dict(_start(dropout))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(samples(), batch_size=8)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    trace = Trace([], [], [], [])
    for _, tokens in zip(range(steps), loader, strict=False):
        loss = loss_of(accelerator, model, tokens)
        accelerator.backward(loss)
        named = dict(_inner(accelerator, model).named_parameters(remove_duplicate=False))
        trace.gradients.append({name: _whole(one.grad) for name, one in named.items() if one.grad is not None})
        trace.norms.append(float(_whole(accelerator.clip_grad_norm_(model.parameters(), 0.5))))
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        trace.weights.append({name: _whole(one) for name, one in named.items()})
    return trace


def _start(dropout: float) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TinyModel(dropout).state_dict()


def loss_of(accelerator: Accelerator, model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean over all tokens of all processes, of which each computes its share."""
    logits, counted = model(tokens), tokens > 0
    total = nn.functional.cross_entropy(logits[counted], tokens.roll(1, dims=1)[counted], reduction="sum")
    return total / tokens_of_each(accelerator, counted.sum())


def tokens_of_each(accelerator: Accelerator, count: Tensor) -> Tensor:
    """How many tokens each process has, in the mean."""
    mean: Tensor = accelerator.reduce(count.float(), "mean")
    return mean


def _inner(accelerator: Accelerator, model: Any) -> Any:
    """The user's model, of no type: its attributes are modules, and layers of backends add methods to them."""
    return accelerator.unwrap_model(model)


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


# ---------------------------------------------------------------- how faults are planted


@dataclass(frozen=True)
class ParallelismBug:
    """One fault and what is known of it.

    Args:
        name: of the entry.
        plan: one of `PLANS`.
        truth: what is wrong, in one line.
        planted: a context in which the fault is there.
        differs: what differs first: "loss", "gradient", "norm", "parameter", "buffer", "dropout" or "samples".
        first: names of the modules, parameters or buffers of which one has to be named as the first that differs.
        ratio: found divided by right, where it is defined.
        step: the step after which it shows, counted from zero.
    """

    name: str
    plan: str
    truth: str
    planted: Callable[[], AbstractContextManager[None]]
    differs: str
    first: tuple[str, ...]
    ratio: float | None = None
    step: int = 0


CATALOGUE: Final[dict[str, ParallelismBug]] = {}
"""By name, the faults."""

_PARAMETERS: Final = tuple(name for name, _ in TinyModel().named_parameters())

Plant = Callable[[], Iterator[None]]


def _bug(
    name: str, *, truth: str, differs: str, first: tuple[str, ...], ratio: float | None = None, step: int = 0
) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        plan = name.partition("_")[0]
        CATALOGUE[name] = ParallelismBug(name, plan, truth, contextmanager(plant), differs, first, ratio, step)
        return plant

    return register


@contextmanager
def _around_prepare(
    before: Callable[[TinyModel], object] | None = None,
    after: Callable[[Accelerator, Any], object] | None = None,
    loader: Callable[[Accelerator, Any], Any] | None = None,
) -> Iterator[None]:
    """Change models before or after `prepare`; `loader` makes of a loader what comes back for it."""
    original = Accelerator.prepare

    def prepare(accelerator: Accelerator, *given: Any, **options: Any) -> Any:
        models = [index for index, one in enumerate(given) if isinstance(one, TinyModel)]
        for index in models if before else ():
            before(given[index])  # type: ignore[misc]
        prepared = original(accelerator, *given, **options)
        answers = list(prepared) if len(given) > 1 else [prepared]
        for index in models if after else ():
            after(accelerator, answers[index])  # type: ignore[misc]
        for index, one in enumerate(given):
            if loader is not None and isinstance(one, DataLoader):
                answers[index] = loader(accelerator, one)
        return tuple(answers) if len(given) > 1 else answers[0]

    with mock.patch.object(Accelerator, "prepare", prepare):
        yield


@contextmanager
def _after_backward(change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Change the parameters, by name, after each backward."""
    original = Accelerator.backward
    seen: list[Any] = []

    def backward(accelerator: Accelerator, *args: Any, **options: Any) -> None:
        original(accelerator, *args, **options)
        change(dict(_inner(accelerator, seen[-1]).named_parameters()))

    remember = _around_prepare(after=lambda accelerator, model: seen.append(model))
    with remember, mock.patch.object(Accelerator, "backward", backward):
        yield


def _replica(model: nn.Module) -> DistributedDataParallel:
    return next(module for module in model.modules() if isinstance(module, DistributedDataParallel))


def _ignored_by_ddp(*names: str) -> Callable[[TinyModel], None]:
    def ignore(model: TinyModel) -> None:
        ignore_in: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore_in(model, list(names))

    return ignore


@contextmanager
def _clipping_by_local_norm() -> Iterator[None]:
    """Clip by the norm of the shards of this process."""

    def clip(accelerator: Accelerator, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        local = [_local(one.grad) for one in parameters if one.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, norm_type) for gradient in local]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        for gradient in local:
            gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    with mock.patch.object(Accelerator, "clip_grad_norm_", clip):
        yield


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


# ---------------------------------------------------------------- data parallelism


@_bug(
    "ddp_parameter_left_out",
    truth="One parameter is on the list of those that DistributedDataParallel leaves alone, so it is never averaged.",
    differs="gradient",
    first=("blocks.1.up.weight",),
)
def _ddp_parameter_left_out() -> Iterator[None]:
    with _around_prepare(before=_ignored_by_ddp("blocks.1.up.weight")):
        yield


def _scaled_hook(factor: float) -> Callable[[Accelerator, Any], None]:
    """Make the model send its gradients by a hook that multiplies their sum."""

    def register(accelerator: Accelerator, model: Any) -> None:
        def send(state, bucket):  # type: ignore[no-untyped-def] # torch compares annotations with objects
            work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
            assert work is not None
            return work.get_future().then(lambda future: future.value()[0] * factor)

        _replica(model).register_comm_hook(None, send)

    return register


@_bug(
    "ddp_sum_for_mean",
    truth="The communication hook adds up gradients and does not divide by the number of processes.",
    differs="gradient",
    first=_PARAMETERS,
    ratio=2.0,
)
def _ddp_sum_for_mean() -> Iterator[None]:
    with _around_prepare(after=_scaled_hook(1.0)):
        yield


@_bug(
    "ddp_averaged_twice",
    truth="The communication hook divides by the number of processes twice.",
    differs="gradient",
    first=_PARAMETERS,
    ratio=0.5,
)
def _ddp_averaged_twice() -> Iterator[None]:
    with _around_prepare(after=_scaled_hook(0.25)):
        yield


@_bug(
    "ddp_never_synchronised",
    truth="The model is left in the state of no_sync, so that no gradient is ever averaged.",
    differs="gradient",
    first=_PARAMETERS,
)
def _ddp_never_synchronised() -> Iterator[None]:
    def leave(accelerator: Accelerator, model: Any) -> None:
        _replica(model).require_backward_grad_sync = False

    with _around_prepare(after=leave):
        yield


@_bug(
    "ddp_unsynchronised_start",
    truth="One layer is initialised again after prepare, from each process's own seed.",
    differs="parameter",
    first=("blocks.0.up.weight", "blocks.0.up.bias", "blocks.0.up"),
)
def _ddp_unsynchronised_start() -> Iterator[None]:
    def initialise(accelerator: Accelerator, model: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 + accelerator.process_index)
            _inner(accelerator, model).blocks[0].up.reset_parameters()

    with _around_prepare(after=initialise):
        yield


@_bug(
    "ddp_stale_buffer",
    truth="A buffer of the first block is set back to its first value before each forward.",
    differs="buffer",
    first=("blocks.0.scale",),
    step=1,
)
def _ddp_stale_buffer() -> Iterator[None]:
    def set_back(block: Any, inputs: Any) -> None:
        block.scale.fill_(1.0)

    def hold(accelerator: Accelerator, model: Any) -> None:
        block = _inner(accelerator, model).blocks[0]
        block.register_forward_pre_hook(set_back)

    with _around_prepare(after=hold):
        yield


@_bug(
    "ddp_mean_over_local_tokens",
    truth="Each process divides its loss by its own number of tokens; the mean of means is not the mean.",
    differs="loss",
    first=_PARAMETERS,
)
def _ddp_mean_over_local_tokens() -> Iterator[None]:
    with mock.patch(f"{__name__}.tokens_of_each", lambda accelerator, count: count.float()):
        yield


@_bug(
    "ddp_equal_dropout",
    truth="All processes are seeded alike after prepare, so that their samples have the same dropout masks.",
    differs="dropout",
    first=("blocks.0.dropout", "blocks.1.dropout"),
)
def _ddp_equal_dropout() -> Iterator[None]:
    with _around_prepare(after=lambda accelerator, model: torch.manual_seed(0)):
        yield


@_bug(
    "ddp_tie_cut",
    truth="The head has a copy of the embedding after prepare, which no optimizer has: one of the two is updated.",
    differs="gradient",
    first=("embed.weight", "head.weight"),
)
def _ddp_tie_cut() -> Iterator[None]:
    def cut(accelerator: Accelerator, model: Any) -> None:
        head = _inner(accelerator, model).head
        head.weight = nn.Parameter(head.weight.detach().clone())

    with _around_prepare(after=cut):
        yield


@_bug(
    "ddp_bias_frozen",
    truth="The bias of a norm does not train in the parallel run.",
    differs="gradient",
    first=("blocks.0.norm.bias",),
    ratio=0.0,
)
def _ddp_bias_frozen() -> Iterator[None]:
    with _around_prepare(before=lambda model: model.get_parameter("blocks.0.norm.bias").requires_grad_(False)):
        yield


@_bug(
    "ddp_loader_not_divided",
    truth="The loader is not prepared: all processes read the same samples, half of what a step should have.",
    differs="samples",
    first=_PARAMETERS,
)
def _ddp_loader_not_divided() -> Iterator[None]:
    def read_alone(accelerator: Accelerator, given: Any) -> Any:
        return DataLoader(given.dataset, batch_size=given.batch_size // accelerator.num_processes)

    with _around_prepare(loader=read_alone):
        yield


# ---------------------------------------------------------------- sharded data parallelism


@_bug(
    "fsdp2_wrong_scale",
    truth="Gradients of the second block are divided by one in place of the number of processes.",
    differs="gradient",
    first=tuple(name for name in _PARAMETERS if name.startswith("blocks.1.")),
    ratio=2.0,
)
def _fsdp2_wrong_scale() -> Iterator[None]:
    def scale(accelerator: Accelerator, model: Any) -> None:
        block = _inner(accelerator, model).blocks[1]
        # gloo has no sum of multiples.
        block.set_force_sum_reduction_for_comms(True)
        block.set_gradient_divide_factor(1.0)

    with _around_prepare(after=scale):
        yield


@_bug(
    "fsdp2_wrong_shard",
    truth="The processes hold each other's rows of one weight.",
    differs="parameter",
    first=("blocks.0.up.weight", "blocks.0.up"),
)
def _fsdp2_wrong_shard() -> Iterator[None]:
    def exchange(accelerator: Accelerator, model: Any) -> None:
        weight = _inner(accelerator, model).blocks[0].up.weight
        rows = weight.full_tensor().chunk(accelerator.num_processes)
        with torch.no_grad():
            weight.to_local().copy_(rows[accelerator.num_processes - 1 - accelerator.process_index])

    with _around_prepare(after=exchange):
        yield


@_bug(
    "fsdp2_clip_by_local_norm",
    truth="Gradients are clipped by the norm of this process's shards.",
    differs="norm",
    first=_PARAMETERS,
)
def _fsdp2_clip_by_local_norm() -> Iterator[None]:
    with _clipping_by_local_norm():
        yield


@_bug(
    "fsdp2_block_never_reduced",
    truth="The first block is left without gradient synchronisation, so its shards never get a gradient.",
    differs="gradient",
    first=tuple(name for name in _PARAMETERS if name.startswith("blocks.0.")),
    ratio=0.0,
)
def _fsdp2_block_never_reduced() -> Iterator[None]:
    with _around_prepare(
        after=lambda accelerator, model: _inner(accelerator, model).blocks[0].set_requires_gradient_sync(False)
    ):
        yield


# ---------------------------------------------------------------- tensor parallelism


@_bug(
    "tp_missing_all_reduce",
    truth="Layers that are divided by rows return the part that this process computed, without the sum.",
    differs="loss",
    first=("blocks.0.down", "blocks.0.down.weight", "blocks.0.down.bias"),
)
def _tp_missing_all_reduce() -> Iterator[None]:
    def keep_part(output_layouts: Any, use_local_output: Any, module: Any, outputs: Any, mesh: Any) -> Any:
        return outputs.to_local()

    with mock.patch.object(RowwiseParallel, "_prepare_output_fn", staticmethod(keep_part)):
        yield


@_bug(
    "tp_bias_of_each_process",
    truth="The bias of a layer that is divided by rows is added once by each process.",
    differs="loss",
    first=("blocks.0.down", "blocks.0.down.bias"),
)
def _tp_bias_of_each_process() -> Iterator[None]:
    def add(accelerator: Accelerator, model: Any) -> None:
        down = _inner(accelerator, model).blocks[0].down
        down.register_forward_hook(lambda module, inputs, output: output + module.bias.full_tensor())

    with _around_prepare(after=add):
        yield


@_bug(
    "tp_replicated_gradient_summed",
    truth="Gradients of norms, which every process has whole, are added up over the processes that divide the layers.",
    differs="gradient",
    first=tuple(name for name in _PARAMETERS if ".norm." in name),
    ratio=2.0,
)
def _tp_replicated_gradient_summed() -> Iterator[None]:
    def add_up(parameters: dict[str, Any]) -> None:
        for name, parameter in parameters.items():
            if ".norm." in name:
                torch.distributed.all_reduce(_local(parameter.grad))

    with _after_backward(add_up):
        yield


@_bug(
    "tp_norm_without_reduction",
    truth="Gradients are clipped by the norm of this process's part of the divided weights.",
    differs="norm",
    first=_PARAMETERS,
)
def _tp_norm_without_reduction() -> Iterator[None]:
    with _clipping_by_local_norm():
        yield


@_bug(
    "tp_different_dropout",
    truth="Processes that hold the same activations are seeded differently, so that their dropout masks differ.",
    differs="dropout",
    first=("blocks.0.dropout", "blocks.1.dropout"),
)
def _tp_different_dropout() -> Iterator[None]:
    with _around_prepare(after=lambda accelerator, model: torch.manual_seed(1 + accelerator.process_index)):
        yield
