"""Whole trainings beside the same loops in plain torch, and from launch to exit beside other libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from bench.case import Call, Case, Scope, Side, Work
from bench.metering import paused

GROUP: Final = "whole_runs"
TRAINING: Final = (
    "Trainings: three epochs over 1,792 samples of 64 numbers by a network of two layers (digits), or 40 steps of a "
    "transformer of two layers over text of 64 characters (char-GPT), with accumulation over two micro-batches and a "
    'schedule; "raw" is the loop in plain torch, with DDP on two processes.'
)
END_TO_END: Final = (
    "From launch to exit: wall time of a launch of two processes that train one epoch of digits: by "
    "`accel launch`; by torchrun for the original, whose launcher starts one process on CPUs; by `fabric run`."
)
IMAGES: Final = (
    'Images: 2,048 of 3 x 64 x 64 bytes in memory, read by two DataLoader workers; "raw" is the plain loader.'
)
BEHIND: Final = (
    'Asynchronous save: twenty steps of a model of 17 MB, with a save that begins in the first one; "raw" saves '
    "nothing. The wait for the end of the save is not counted."
)
EVALUATING: Final = (
    'Evaluation: counts right guesses of both processes over 10,000 samples; "raw" gathers them with torch alone.'
)

SAMPLES, FEATURES, CLASSES, SIZE, EPOCHS = 1792, 64, 10, 32, 3
CHARACTERS, CONTEXT, WIDTH, TEXTS = 65, 64, 64, 40
SAVED_STEPS, EVALUATED = 20, 10_000

Parts = tuple[Any, Any, Any, Any]
"""A model, its optimizer, schedule and loader."""


# ---------------------------------------------------------------- the trainings
def digits() -> Parts:
    """A small network, and numbers in the shape of the digits of the tutorial."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 128), torch.nn.ReLU(), torch.nn.Linear(128, CLASSES))
    data = TensorDataset(torch.rand(SAMPLES, FEATURES), torch.randint(CLASSES, (SAMPLES,)))
    return with_optimizer(model, DataLoader(data, batch_size=SIZE, shuffle=True))


def characters() -> Parts:
    """A transformer that guesses the next character."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, CHARACTERS)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

        def forward(self, text: Any) -> Any:
            embedded = self.embed(text) + self.place(torch.arange(CONTEXT))
            return self.head(self.blocks(embedded, mask=self.mask, is_causal=True)).flatten(0, 1)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    text = torch.randint(CHARACTERS, (TEXTS * 16, CONTEXT))
    data = TensorDataset(text, text.roll(-1, 1))
    return with_optimizer(Transformer(), DataLoader(data, batch_size=16, shuffle=True))


def with_optimizer(model: Any, loader: Any) -> Parts:
    """What trains the model."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1000), loader


def prepared_training(make: Callable[[], Parts], epochs: int, scope: Scope) -> Call:
    """The loop with an Accelerator."""
    import torch

    accelerator = scope.library("accel_torch", "accelerate").Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, scheduler, loader = accelerator.prepare(*make())

    def train() -> None:
        for _ in range(epochs):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    # A variable, as in the plain loop: the graph that it keeps makes operations on parameters cheaper.
                    loss = torch.nn.functional.cross_entropy(model(inputs), targets.flatten())
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

    return train


def plain_training(make: Callable[[], Parts], epochs: int, scope: Scope) -> Call:
    """The same loop as it is written with torch alone."""
    import torch
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    model, optimizer, scheduler, loader = make()
    sampler: Any = None
    if several():
        sampler = DistributedSampler(loader.dataset)
        loader = DataLoader(loader.dataset, loader.batch_size, sampler=sampler)
        model = torch.nn.parallel.DistributedDataParallel(model)

    def train() -> None:
        for epoch in range(epochs):
            if sampler is not None:
                sampler.set_epoch(epoch)
            for index, (inputs, targets) in enumerate(loader, start=1):
                last = index % 2 == 0
                if sampler is not None:
                    model.require_backward_grad_sync = last
                loss = torch.nn.functional.cross_entropy(model(inputs), targets.flatten())
                (loss / 2).backward()  # type: ignore[no-untyped-call]
                if last:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

    return train


def several() -> bool:
    """Whether there are several processes, whose group is then made."""
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return True


def training(name: str, make: Callable[[], Parts], epochs: int, processes: int, limit: float) -> Case:
    """A case of a training beside plain torch."""
    sides: tuple[Side, Side] = (partial(prepared_training, make, epochs), partial(plain_training, make, epochs))
    work = Work(sides[0], raw=sides[1], processes=processes, rounds=6)
    people = "1 process" if processes == 1 else f"{processes} processes"
    return Case(GROUP, f"train {name}, {people}", "CPU ms", "ours/raw", limit, work, TRAINING)


# ---------------------------------------------------------------- from launch to exit
SCRIPT: Final = f"""
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear({FEATURES}, 128), torch.nn.ReLU(), torch.nn.Linear(128, {CLASSES}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.rand({SAMPLES}, {FEATURES}), torch.randint({CLASSES}, ({SAMPLES},)))
loader = DataLoader(data, batch_size={SIZE}, shuffle=True)
if sys.argv[1] == "fabric":
    from lightning.fabric import Fabric

    fabric = Fabric()
    model, optimizer = fabric.setup(model, optimizer)
    loader, backward = fabric.setup_dataloaders(loader), fabric.backward
else:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    backward = accelerator.backward
for inputs, targets in loader:
    backward(torch.nn.functional.cross_entropy(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
# Else the slower process may abort when the other closes its connections.
if sys.argv[1] == "fabric":
    fabric.barrier()
    torch.distributed.destroy_process_group()
else:
    accelerator.end_training()
"""


FABRIC: Final = ("--accelerator", "cpu", "--strategy", "ddp", "--devices", "2")


def until_exit(kind: str, scope: Scope) -> Call:
    """A launch of two processes until its end."""
    script = scope.folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    launched: dict[str, list[str]] = {
        "ours": [sys.executable, "-m", "accel_cli.main", "launch", "--cpu", "--num_processes", "2"],
        "peer": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"],
        "fabric": [os.environ.get("BENCH_FABRIC", ""), "-m", "lightning.fabric.cli", *FABRIC],
    }
    command = launched["fabric" if kind == "fabric" else scope.kind]

    def run() -> None:
        done = subprocess.run([*command, str(script), kind], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}.\n{done.stderr[-2000:]}")

    return run


# ---------------------------------------------------------------- parts of a run
def images(scope: Scope) -> Call:
    """An epoch of images that workers read from memory."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    pixels = torch.zeros(2048, 3, 64, 64, dtype=torch.uint8)
    plain: Any = DataLoader(TensorDataset(pixels, torch.zeros(2048)), batch_size=32, num_workers=2)
    loader = plain
    if scope.kind == "ours":
        loader = scope.library("accel_torch").Accelerator(cpu=True).prepare(plain)

    def read() -> None:
        for _ in loader:
            pass

    return read


def steps_behind_a_save(saves: bool, scope: Scope) -> Call:
    """Steps of which the first begins an asynchronous save."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    accelerator = scope.library("accel_torch").Accelerator(cpu=True)
    plain = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))
    inputs = torch.randn(512, 1024)

    def steps() -> None:
        if saves:
            accelerator.save_state(str(scope.folder / "behind"), async_save=True)
        for _ in range(SAVED_STEPS):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if saves:
            with paused():
                accelerator.wait_for_checkpoint()

    return steps


def evaluation(scope: Scope) -> Call:
    """Right guesses on all processes, each sample once."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: Any = torch.nn.Sequential(torch.nn.Linear(FEATURES, 128), torch.nn.ReLU(), torch.nn.Linear(128, CLASSES))
    data = TensorDataset(torch.rand(EVALUATED, FEATURES), torch.randint(CLASSES, (EVALUATED,)))
    if scope.kind == "raw":
        return plain_evaluation(model, data)
    accelerator = scope.library("accel_torch", "accelerate").Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(data, batch_size=50))

    def evaluate() -> None:
        right = 0
        with torch.inference_mode():
            for inputs, targets in loader:
                guesses, truth = accelerator.gather_for_metrics((model(inputs).argmax(-1), targets))
                right += int((guesses == truth).sum())

    return evaluate


def plain_evaluation(model: Any, data: Any) -> Call:
    """The same with a distributed sampler and one collective of torch for each of both tensors."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    several()
    loader = DataLoader(data, batch_size=50, sampler=DistributedSampler(data, shuffle=False))

    def gathered(tensor: Any) -> Any:
        everywhere = torch.empty(dist.get_world_size() * len(tensor), dtype=tensor.dtype)
        dist.all_gather_into_tensor(everywhere, tensor)
        return everywhere

    def evaluate() -> None:
        right = 0
        with torch.inference_mode():
            for inputs, targets in loader:
                right += int((gathered(model(inputs).argmax(-1)) == gathered(targets)).sum())

    return evaluate


EXITS: Final = partial(until_exit, "launched")
FABRIC_EXITS: Final = partial(until_exit, "fabric")
SAVES: Final = Work(partial(steps_behind_a_save, True), raw=partial(steps_behind_a_save, False), alone=True)
EXIT: Final = "train digits on two processes, from launch to exit"

WHOLE: Final = partial(Case, GROUP)

CASES: Final = (
    training("digits", digits, EPOCHS, 1, 1.01),
    training("digits", digits, EPOCHS, 2, 1.02),
    training("char-GPT", characters, 1, 1, 1.01),
    training("char-GPT", characters, 1, 2, 1.02),
    WHOLE(EXIT, "wall s", "ours/peer", 1.0, Work(EXITS, EXITS, alone=True), END_TO_END),
    WHOLE(
        f"{EXIT}, beside Fabric",
        *("wall s", "ours/raw", 1.0, Work(EXITS, raw=FABRIC_EXITS, alone=True), END_TO_END),
        needs="fabric",
    ),
    WHOLE("an epoch of images, 2 workers", "CPU ms", "ours/raw", 1.02, Work(images, raw=images), IMAGES),
    WHOLE("a step while an asynchronous save runs", "wall ms", "ours/raw", 1.05, SAVES, BEHIND, SAVED_STEPS),
    WHOLE(
        "evaluate 10,000 samples, 2 processes",
        *("CPU ms", "ours/raw", 1.05, Work(evaluation, raw=evaluation, processes=2), EVALUATING),
    ),
)
