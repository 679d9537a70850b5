"""Training loops that do not use this library, with and without one fault, for the checks of scripts.

Every script is complete and starts from the variables of torchrun:

    entry = FAULTS["loss_by_tokens_of_one_rank"]
    Path("train.py").write_text(entry.script)

`CLEAN` are right: several processes compute what one computes, and what they save they continue exactly. Each entry of
`FAULTS` is one of the right scripts with a change of a few lines. It was written before the checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ("CLEAN", "FAULTS", "Loop")


@dataclass(frozen=True)
class Loop:
    """One script.

    Args:
        name: of the entry.
        script: the text.
        truth: what it does, or what is wrong, in one line.
        processes: the number of processes that show it.
        check: "parity" or "resume".
        causes: texts of which one has to be in the report, in small letters.
        also: whether one process has the fault too, so that the report may only name it under "also".
        needs: a library that the script imports besides torch.
    """

    name: str
    script: str
    truth: str
    processes: int = 2
    check: str = "parity"
    causes: tuple[str, ...] = ()
    also: bool = False
    needs: str = ""


def _edited(script: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert script.count(old) == 1, (old, script.count(old))
        script = script.replace(old, new)
    return script


# ---------------------------------------------------------------- the right scripts

_REPLICAS: Final = '''\
"""DistributedDataParallel with a sampler, accumulation, clipping and a schedule."""
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATION = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for index, (inputs, targets) in enumerate(loader):
            last = (index + 1) % ACCUMULATION == 0
            with nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(inputs), targets)
                (loss / ACCUMULATION).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    print("loss", loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

_PLAIN_STEP: Final = """\
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""

_REPLICAS_PLAIN: Final = '''\
"""DistributedDataParallel, one batch for each step."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

_TOKENS: Final = '''\
"""Padded sequences; the loss is a mean over the tokens of all ranks."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def collate(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    data = [torch.randint(1, 16, (2 + i % 7,), generator=draw) for i in range(48)]
    loader = DataLoader(data, batch_size=3, sampler=DistributedSampler(data, shuffle=True), collate_fn=collate)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for tokens in loader:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        mask = targets > 0
        total = nn.functional.cross_entropy(model(inputs)[mask], targets[mask], reduction="sum")
        count = mask.sum().float()
        dist.all_reduce(count)
        loss = total * world / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

_SHARDED: Final = '''\
"""fully_shard with clipping and a schedule."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 20), nn.Linear(20, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

_TENSORS: Final = '''\
"""parallelize_module; every rank reads the same samples."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 16), nn.Linear(16, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x + self.down(torch.tanh(self.up(x))))


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Net()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
    order = torch.Generator().manual_seed(7)
    for inputs, targets in DataLoader(data, batch_size=8, shuffle=True, generator=order):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

_BY_HAND: Final = '''\
"""Gradients averaged by hand; the weights of rank 0 are sent to all."""
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def average(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        average(model)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

_RESUMED: Final = '''\
"""Plain torch that saves and resumes by itself: train.py --folder F [--resume FILE]."""
import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="checkpoints")
    parser.add_argument("--resume")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())
    first = 0
    if given.resume:
        state = torch.load(given.resume)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["generator"])
        first = state["step"]
    step = 0
    for epoch in range(3):
        order = torch.Generator().manual_seed(epoch)
        loader = DataLoader(data, batch_size=8, sampler=torch.randperm(64, generator=order).tolist())
        if first >= step + len(loader):
            step += len(loader)
            continue
        skipped = max(first - step, 0)
        rest = list(loader.sampler)[8 * skipped :]
        step += skipped
        for inputs, targets in DataLoader(data, batch_size=8, sampler=rest, generator=torch.Generator()):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            state |= {"scheduler": scheduler.state_dict(), "generator": torch.get_rng_state()}
            os.makedirs(given.folder, exist_ok=True)
            torch.save(state, os.path.join(given.folder, f"step_{step}.pt"))


if __name__ == "__main__":
    main()
'''

_CLEAN: Final = (
    Loop("replicas", _REPLICAS, "DistributedDataParallel, accumulation, clipping, schedule"),
    Loop("tokens", _TOKENS, "a mean over the tokens of all ranks"),
    Loop("sharded", _SHARDED, "fully_shard, clipping, schedule"),
    Loop("tensors", _TENSORS, "parallelize_module"),
    Loop("by_hand", _BY_HAND, "gradients averaged by hand"),
    Loop(
        "tensors_and_shards",
        _edited(
            _TENSORS,
            ('(dist.get_world_size(),), mesh_dim_names=("tp",)', 'shape, mesh_dim_names=("dp", "tp")'),
            (
                "    mesh = init",
                "    shape = (dist.get_world_size() // 2 or 1, 2 if dist.get_world_size() > 1 else 1)\n    mesh = init",
            ),
            ("parallelize_module(model, mesh,", 'parallelize_module(model, mesh["tp"],'),
            ("    optimizer =", '    fully_shard(model, mesh=mesh["dp"])\n    optimizer ='),
            (
                "from torch.distributed.tensor.parallel",
                "from torch.distributed.fsdp import fully_shard\nfrom torch.distributed.tensor.parallel",
            ),
            (
                "    order = torch.Generator().manual_seed(7)\n",
                '    shards = mesh["dp"]\n'
                "    sampler = DistributedSampler(data, shards.size(), shards.get_local_rank())\n",
            ),
            ("shuffle=True, generator=order", "sampler=sampler"),
            (
                "import DataLoader, TensorDataset\n",
                "import DataLoader, TensorDataset\nfrom torch.utils.data.distributed import DistributedSampler\n",
            ),
        ),
        "two data shards of two ranks with parts of the tensors",
        processes=4,
    ),
    Loop(
        "sharded_accumulation",
        _edited(
            _SHARDED,
            ("for inputs, targets in loader", "for index, (inputs, targets) in enumerate(loader)"),
            (
                "            loss.backward()\n",
                "            model.set_requires_gradient_sync(index % 2 == 1)\n            (loss / 2).backward()\n"
                "            if index % 2 == 0:\n                continue\n",
            ),
        ),
        "fully_shard that sends the gradients of the last micro-batch",
    ),
    Loop(
        "low_precision",
        _edited(
            _REPLICAS_PLAIN,
            (
                "            loss = nn.functional.cross_entropy(model(inputs), targets)\n",
                '            with torch.autocast("cpu", torch.bfloat16):\n'
                "                loss = nn.functional.cross_entropy(model(inputs), targets)\n",
            ),
        ),
        "autocast to bfloat16",
    ),
    Loop(
        "scaler",
        _edited(
            _REPLICAS_PLAIN,
            ("    optimizer = torch", '    scaler = torch.amp.GradScaler("cpu")\n    optimizer = torch'),
            ("            loss.backward()\n", "            scaler.scale(loss).backward()\n"),
            (
                "            optimizer.step()\n",
                "            scaler.unscale_(optimizer)\n"
                "            nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
                "            scaler.step(optimizer)\n            scaler.update()\n",
            ),
        ),
        "a scaler, whose gradients are unscaled before they are clipped",
    ),
    Loop(
        "stream",
        _edited(
            _REPLICAS_PLAIN,
            (
                "\n\ndef main",
                "\n\nclass Stream(torch.utils.data.IterableDataset):\n"
                "    def __init__(self, x, y):\n        self.x, self.y = x, y\n\n"
                "    def __iter__(self):\n"
                "        rank, world = dist.get_rank(), dist.get_world_size()\n"
                "        for i in range(rank, len(self.x), world):\n"
                "            yield self.x[i], self.y[i]\n\n\ndef main",
            ),
            ("    data = TensorDataset(x,", "    data = Stream(x,"),
            ("    sampler = DistributedSampler(data, shuffle=True, seed=3)\n", ""),
            ("batch_size=4, sampler=sampler)", "batch_size=4)"),
            ("        sampler.set_epoch(epoch)\n", ""),
        ),
        "a stream that each rank divides itself",
    ),
    Loop(
        "workers",
        _edited(_REPLICAS_PLAIN, ("sampler=sampler)", "sampler=sampler, num_workers=1, drop_last=True)")),
        "workers that read the samples",
    ),
    Loop(
        "indexed",
        _edited(
            _BY_HAND,
            ("    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=True))\n", ""),
            (
                "    for inputs, targets in loader:\n",
                "    rank, world = dist.get_rank(), dist.get_world_size()\n    for start in range(0, 64, 8):\n"
                "        part = torch.arange(start, start + 8)[rank::world]\n"
                "        inputs, targets = data.tensors[0][part], data.tensors[1][part]\n",
            ),
        ),
        "rows that the script takes from a tensor by rank and world size",
    ),
    Loop(
        "two_optimizers",
        _edited(
            _REPLICAS_PLAIN,
            (
                "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n",
                "    judge = DistributedDataParallel(nn.Linear(3, 1))\n"
                "    judging = torch.optim.Adam(judge.parameters(), lr=0.01)\n"
                "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n",
            ),
            (
                "            optimizer.zero_grad()\n",
                "            optimizer.zero_grad()\n"
                "            judging.zero_grad()\n"
                "            judge(model(inputs).detach()).square().mean().backward()\n"
                "            judging.step()\n",
            ),
        ),
        "two models with an optimizer each",
    ),
    Loop(
        "closure",
        _edited(
            _REPLICAS_PLAIN,
            (
                _PLAIN_STEP,
                "\n            def closure():\n                optimizer.zero_grad()\n"
                "                loss = nn.functional.cross_entropy(model(inputs), targets)\n"
                "                loss.backward()\n                return loss\n\n            optimizer.step(closure)\n",
            ),
        ),
        "a step with a closure",
    ),
    Loop(
        "dropout",
        _edited(
            _REPLICAS_PLAIN,
            ("nn.Tanh(), nn.Linear", "nn.Tanh(), nn.Dropout(0.5), nn.Linear"),
            ("    optimizer =", "    torch.manual_seed(100 + rank)\n    optimizer ="),
        ),
        "dropout with a seed for each rank",
    ),
    Loop(
        "zero",
        _edited(
            _REPLICAS_PLAIN,
            (
                "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
                "ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)",
            ),
            (
                "from torch import nn\n",
                "from torch import nn\nfrom torch.distributed.optim import ZeroRedundancyOptimizer\n",
            ),
        ),
        "an optimizer whose states are divided",
    ),
    Loop(
        "fabric",
        '''\
"""Lightning Fabric."""
import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=4, shuffle=True))
    for epoch in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()


if __name__ == "__main__":
    main()
''',
        "Lightning Fabric",
        needs="lightning",
    ),
    Loop(
        "trainer",
        '''\
"""The Trainer of transformers."""
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(64, 6, generator=draw)
    data = [{"x": row, "labels": (row[0] > 0).long()} for row in x]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            num_train_epochs=2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            learning_rate=0.01,
            lr_scheduler_type="constant",
            disable_tqdm=True,
        )
        Trainer(Net(), settings, train_dataset=data).train()


if __name__ == "__main__":
    main()
''',
        "the Trainer of transformers",
        needs="transformers",
    ),
    Loop("resumed", _RESUMED, "a script that saves and resumes by itself", processes=1, check="resume"),
)

CLEAN: Final = {loop.name: loop for loop in _CLEAN}
"""The right scripts, by name."""

# ---------------------------------------------------------------- the faults

_FAULTS: Final = (
    Loop(
        "loss_divided_twice",
        _edited(
            _REPLICAS,
            (
                "loss = nn.functional.cross_entropy(model(inputs), targets)\n",
                "loss = nn.functional.cross_entropy(model(inputs), targets) / ACCUMULATION\n",
            ),
        ),
        "the loss is divided twice by the number of micro-batches",
        causes=("divided twice", "divided by 4"),
        also=True,
    ),
    Loop(
        "loss_by_tokens_of_one_rank",
        _edited(_TOKENS, ("        dist.all_reduce(count)\n", ""), ("total * world / count", "total / count")),
        "each rank divides by its own number of tokens",
        causes=("its own number of",),
    ),
    Loop(
        "norm_of_one_shard",
        _edited(
            _SHARDED,
            (
                "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
                "            local = [p.grad.to_local() for p in model.parameters()]\n"
                "            norm = torch.stack([g.norm() for g in local]).norm()\n"
                "            for g in local:\n                g.mul_((0.1 / norm).clamp(max=1.0))\n",
            ),
        ),
        "each rank clips by the norm of its shard",
        causes=("clip", "norm of"),
    ),
    Loop(
        "parameter_outside_replicas",
        _edited(
            _REPLICAS_PLAIN,
            ("    optimizer =", "    scale = nn.Parameter(torch.ones(3))\n    optimizer ="),
            ("SGD(model.parameters(),", "SGD([*model.parameters(), scale],"),
            ("cross_entropy(model(inputs), targets)", "cross_entropy(model(inputs) * scale, targets)"),
        ),
        "a parameter of the optimizer is not in the replicated model",
        causes=("not averaged", "no synchronis", "own gradient"),
    ),
    Loop(
        "no_sync_on_the_last",
        _edited(
            _REPLICAS, ("nullcontext() if last else model.no_sync()", "model.no_sync() if last else nullcontext()")
        ),
        "the last micro-batch is computed without synchronisation",
        causes=("no_sync", "not averaged", "own gradient"),
    ),
    Loop(
        "sum_without_division",
        _edited(_BY_HAND, ("            parameter.grad /= dist.get_world_size()\n", "")),
        "gradients are added over the ranks and not divided",
        causes=("added over", "not averaged", "not divided"),
    ),
    Loop(
        "different_weights",
        _edited(
            _BY_HAND,
            ("    for tensor in model.state_dict().values():\n        dist.broadcast(tensor, 0)\n", ""),
        ),
        "each rank begins with other weights",
        causes=("begin with different", "different initial"),
    ),
    Loop(
        "batch_norm",
        _edited(_REPLICAS_PLAIN, ("nn.Linear(6, 16), nn.Tanh()", "nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh()")),
        "BatchNorm normalises over the samples of each rank",
        causes=("syncbatchnorm",),
    ),
    Loop(
        "sampler_without_set_epoch",
        _edited(_REPLICAS_PLAIN, ("        sampler.set_epoch(epoch)\n", "")),
        "every epoch has the same order",
        causes=("set_epoch", "same order"),
        also=True,
    ),
    Loop(
        "padding_counted",
        _edited(_REPLICAS_PLAIN, ("randn(64,", "randn(13,")),
        "the sampler repeats a sample, and the loss counts it twice",
        causes=("padding", "repeat"),
        also=True,
    ),
    Loop(
        "clipped_before_unscale",
        _edited(
            CLEAN["scaler"].script,
            (
                "            scaler.unscale_(optimizer)\n"
                "            nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n",
                "            nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n",
            ),
        ),
        "gradients are clipped while they are scaled",
        causes=("unscale",),
        also=True,
    ),
    Loop(
        "rate_scaled_twice",
        _edited(
            _REPLICAS,
            ("lr=0.01", "lr=0.01 * world"),
            ("min(1.0, (step + 1) / 6)", "world * min(1.0, (step + 1) / 6)"),
        ),
        "the learning rate is multiplied twice by the world size",
        causes=("learning rate",),
    ),
    Loop(
        "frozen_part_added",
        _edited(
            _REPLICAS_PLAIN,
            ("    model = Dist", "    net[0].requires_grad_(False)\n    model = Dist"),
            (
                "            optimizer.zero_grad()\n",
                "            optimizer.zero_grad()\n"
                "            for frozen in net[0].parameters():\n                dist.all_reduce(frozen.data)\n",
            ),
        ),
        "a frozen layer is added up over the ranks after each step",
        causes=("0.weight",),
    ),
    Loop(
        "bias_added_twice",
        _edited(
            _TENSORS,
            (
                "        return self.head(x + self.down(torch.tanh(self.up(x))))\n",
                "        inner = torch.tanh(self.up(x))\n"
                "        weight = self.down.weight.to_local()\n"
                "        part = nn.functional.linear(inner, weight, self.down.bias.to_local())\n"
                "        return self.head(x + Added.apply(part))\n\n\n"
                "class Added(torch.autograd.Function):\n"
                "    @staticmethod\n    def forward(context, part):\n"
                "        part = part.clone()\n        dist.all_reduce(part)\n        return part\n\n"
                "    @staticmethod\n    def backward(context, gradient):\n        return gradient\n",
            ),
        ),
        "each rank adds the bias of a row-wise layer before the sum",
        causes=("bias", "twice"),
    ),
    Loop(
        "gradient_beside_shards",
        _edited(
            _SHARDED,
            ("    fully_shard(model)\n", "    fully_shard(model, ignored_params={model.scale})\n"),
            ("            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n", ""),
        ),
        "a parameter that fully_shard ignores is reduced by nobody",
        causes=("not averaged", "own gradient", "no synchronis"),
    ),
    Loop(
        "equal_dropout",
        _edited(CLEAN["dropout"].script, ("torch.manual_seed(100 + rank)", "torch.manual_seed(100)")),
        "all ranks draw the same dropout masks",
        causes=("same elements", "generators", "dropout"),
        also=True,
    ),
    Loop(
        "stale_average",
        _edited(
            _REPLICAS_PLAIN,
            (
                "    optimizer =",
                "    average = torch.optim.swa_utils.AveragedModel(net)\n"
                "    trained = [p.detach().clone() for p in net.parameters()]\n    optimizer =",
            ),
            (
                "            optimizer.zero_grad()\n",
                "            optimizer.zero_grad()\n"
                "            with torch.no_grad():\n"
                "                for mean, value in zip(average.module.parameters(), trained):\n"
                "                    mean.lerp_(value, 0.1)\n",
            ),
        ),
        "a moving average follows a copy that is never trained",
        causes=("average",),
        also=True,
    ),
    Loop(
        "resumed_without_scheduler",
        _edited(_RESUMED, ('        scheduler.load_state_dict(state["scheduler"])\n', "")),
        "the scheduler begins again",
        processes=1,
        check="resume",
        causes=("scheduler", "learning rate"),
    ),
    Loop(
        "resumed_without_generator",
        _edited(_RESUMED, ('        torch.set_rng_state(state["generator"])\n', "")),
        "the generator of dropout begins again",
        processes=1,
        check="resume",
        causes=("generator",),
    ),
    Loop(
        "resumed_without_position",
        _edited(_RESUMED, ("        skipped = max(first - step, 0)\n", "        skipped = 0\n")),
        "the epoch begins again",
        processes=1,
        check="resume",
        causes=("samples",),
    ),
)

FAULTS: Final = {loop.name: loop for loop in _FAULTS}
"""The scripts with a fault, by name."""
