"""Training scripts of which each leaves one piece of state out of its checkpoints, for `accel check-resume` to find.

Every script is complete, trains on the CPU for about a second beside its imports, alone or in several processes, and
resumes from the newest checkpoint of its folder:

    python train.py --folder runs/one --steps 24 --save_at 15

With `OMIT = False` a run that is started again goes on exactly from what it saved; with `OMIT = True` the piece of
state that the entry names is lost or wrong. Step 15 shows it: it is inside of the second epoch, and off
every period of the scripts. Each process writes `result_<rank>.json` into the folder: its losses by step, and weights.

    entry = CATALOGUE["scheduler_not_prepared"]
    Path("train.py").write_text(entry.script(omit=True))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ("CATALOGUE", "Omission")

_SCRIPT: Final = '''\
"""{truth}"""

import argparse
import json
import random
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import nn

from accel_torch import Accelerator, DataLoaderConfiguration, ProjectConfiguration

OMIT = {omit}


class Count:
    """How many steps are done."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {{"steps": self.steps}}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Kept:
    """Makes an object that has a state of another kind one that a checkpoint can hold."""

    def __init__(self, get, put):
        self.get, self.put = get, put

    def state_dict(self):
        return {{"state": self.get()}}

    def load_state_dict(self, state):
        self.put(state["state"])


{definitions}

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="run")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save_at", type=int, default=0)
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(args.folder, automatic_checkpoint_naming=True),
        dataloader_config=DataLoaderConfiguration(restore_position={position}),
    )
    rank = accelerator.process_index
    torch.manual_seed(1 + rank)
    random.seed(1 + rank)
    np.random.seed(1 + rank)
    count = Count()
    data = torch.randn(48, 4, generator=torch.Generator().manual_seed(3))
{build}
{prepare}
    accelerator.load_state(missing_ok=True)
{after_load}
    losses = {{}}
    while count.steps < args.steps:
{epoch}
        for batch in batches:
{step}
            losses[count.steps] = loss.item()
            count.steps += 1
            if count.steps == args.save_at:
                accelerator.save_state()
            if count.steps >= args.steps:
                break
    weights = [parameter.detach().flatten().tolist() for parameter in accelerator.unwrap_model(model).parameters()]
    result = {{"losses": losses, "weights": weights}}
    Path(args.folder, f"result_{{rank}}.json").write_text(json.dumps(result))
    accelerator.end_training()


if __name__ == "__main__":
    main()
'''

_BUILD: Final = """
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
"""

_PREPARE: Final = """
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(count)
"""

_STEP: Final = """
loss = model(batch).square().mean()
accelerator.backward(loss)
optimizer.step()
optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Omission:
    """One script and what is known of it.

    Args:
        name: of the entry.
        truth: the piece of state that is left out, and how.
        where: the place of the fault: what the script does not save, or undoes after the load.
        finding: what differs first between a run without a stop and a resumed one, as a detector has to report it.
        processes: how many processes it takes at least to see it.
        definitions, build, more_build, prepare, more_prepare, after_load, epoch, step, position: parts of the script;
            those named `more` follow the usual ones.
    """

    name: str
    truth: str
    where: str
    finding: str
    processes: int = 1
    definitions: str = ""
    build: str = _BUILD
    more_build: str = ""
    prepare: str = _PREPARE
    more_prepare: str = ""
    after_load: str = ""
    epoch: str = "batches = loader"
    step: str = _STEP
    position: str = "True"

    def script(self, omit: bool) -> str:
        """The script, with the omission or without it."""
        return _SCRIPT.format(
            truth=self.truth,
            omit=omit,
            definitions=self.definitions.strip() + "\n",
            build=_indented(self.build + self.more_build, 4),
            prepare=_indented(self.prepare + self.more_prepare, 4),
            after_load=_indented(self.after_load, 4),
            epoch=_indented(self.epoch, 8),
            step=_indented(self.step, 12),
            position=self.position,
        )


def _indented(code: str, columns: int) -> str:
    return "\n".join(" " * columns + line if line else "" for line in code.strip("\n").splitlines())


_OMISSIONS: Final = (
    Omission(
        "momentum_of_one_group",
        truth="An optimizer keeps the momentum of its second param group outside of its state.",
        where="the attribute `velocity` of the optimizer, which state_dict does not hold",
        finding="weights of the second param group (the last layer) after the first step after the load",
        definitions='''
class TwoSpeeds(torch.optim.SGD):
    """SGD whose second param group has a momentum of its own making."""

    velocity = None

    def step(self, closure=None):
        special = self.param_groups[1]["params"]
        if OMIT:
            self.velocity = self.velocity or [torch.zeros_like(one) for one in special]
            kept = self.velocity
        else:
            kept = [self.state[one].setdefault("velocity", torch.zeros_like(one)) for one in special]
        for one, velocity in zip(special, kept):
            velocity.mul_(0.9).add_(one.grad)
            one.grad.copy_(velocity)
        return super().step(closure)
''',
        more_build="""
groups = [{"params": model[:4].parameters(), "momentum": 0.9}, {"params": model[4:].parameters()}]
optimizer = TwoSpeeds(groups, lr=0.05)
""",
    ),
    Omission(
        "scheduler_not_prepared",
        truth="The learning-rate scheduler is neither prepared nor registered, so it starts anew.",
        where="prepare: the scheduler is missing",
        finding="the learning rate, and with it the weights, of the steps after the next decay",
        more_build="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)\n",
        more_prepare="""
if not OMIT:
    accelerator.register_for_checkpointing(scheduler)
""",
        step=_STEP + "scheduler.step()\n",
    ),
    Omission(
        "scaler_of_the_script",
        truth="The script's own gradient scaler, which overflows again and again, is not registered and starts anew.",
        where="register_for_checkpointing: the scaler is missing",
        finding="the scale; then weights, at the step that only one of the two runs skips for overflow",
        more_build="""
rates = {"growth_factor": 2.0**20, "backoff_factor": 0.5**20, "growth_interval": 3}
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**105, **rates)
""",
        more_prepare="""
if not OMIT:
    accelerator.register_for_checkpointing(scaler)
""",
        step="""
loss = model(batch).square().mean()
accelerator.backward(scaler.scale(loss) * 2.0**20)
scaler.unscale_(optimizer.optimizer)
for parameter in model.parameters():
    parameter.grad /= 2.0**20
scaler.step(optimizer.optimizer)
scaler.update()
optimizer.optimizer.zero_grad()
""",
    ),
    Omission(
        "generator_of_rank_1",
        truth="After the load, the second process draws random numbers for a look at the model.",
        where="after load_state: torch's generator of rank 1 is moved on",
        finding="torch's generator of rank 1 right after the load; its dropout masks and loss in the next step",
        processes=2,
        after_load="""
if OMIT and rank == 1:
    torch.rand(3)
""",
    ),
    Omission(
        "numpy_generator",
        truth="The numpy generator that augments the batches is not registered.",
        where="register_for_checkpointing: the generator is missing",
        finding="the loss of the first step after the load",
        more_build="noise = np.random.default_rng(5 + rank)\n",
        more_prepare="""
if not OMIT:
    keep = Kept(lambda: json.dumps(noise.bit_generator.state), lambda text: put_state(noise, text))
    accelerator.register_for_checkpointing(keep)
""",
        definitions="""
def put_state(generator, text):
    generator.bit_generator.state = json.loads(text)
""",
        step="batch = batch + 0.1 * torch.from_numpy(noise.standard_normal(tuple(batch.shape))).float()\n" + _STEP,
    ),
    Omission(
        "python_generator",
        truth="Python's generator is seeded again after the load, to be reproducible.",
        where="after load_state: random.seed",
        finding="Python's generator right after the load; the loss of the first step after it",
        after_load="""
if OMIT:
    random.seed(1 + rank)
""",
        step="batch = batch * random.uniform(0.5, 1.5)\n" + _STEP,
    ),
    Omission(
        "sampler_epoch",
        truth="The order of an epoch depends on the sampler's own count of epochs, which starts at zero again.",
        where="the attribute `epoch` of the sampler",
        finding="sample ids of the first batch after the load (saved in the second epoch or later)",
        definitions='''
class Shuffled(torch.utils.data.Sampler):
    """Another order in each epoch."""

    def __init__(self, size):
        self.size, self.epoch = size, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))
        yield from order.tolist()
''',
        more_build="""
sampler = Shuffled(len(data))
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
""",
        after_load="epochs = 0\n",
        epoch="""
sampler.epoch = epochs if OMIT else count.steps // len(loader)
epochs += 1
batches = accelerator.skip_first_batches(loader, count.steps % len(loader))
""",
        position="False",
    ),
    Omission(
        "position_in_the_loader",
        truth="The place in the epoch is not restored: a resumed run starts with the first batch of the epoch.",
        where="DataLoaderConfiguration: restore_position is off, and no batches are skipped",
        finding="sample ids of the first batch after the load (saved inside of an epoch)",
        position="not OMIT",
    ),
    Omission(
        "half_of_a_custom_object",
        truth="A registered object that lowers the learning rate forgets its best loss; its patience is kept.",
        where="Plateau.state_dict: `best` is missing",
        finding="the registered object's behaviour: learning rate and weights some steps after the load",
        definitions='''
class Plateau:
    """Halves the learning rate after two steps without a better loss."""

    def __init__(self):
        self.best, self.bad = float("inf"), 0

    def __call__(self, loss, optimizer):
        self.best, self.bad = (loss, 0) if loss < self.best else (self.best, self.bad + 1)
        if self.bad == 2:
            self.bad = 0
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

    def state_dict(self):
        return {"bad": self.bad} if OMIT else {"bad": self.bad, "best": self.best}

    def load_state_dict(self, state):
        self.bad, self.best = state["bad"], state.get("best", float("inf"))
''',
        more_build="plateau = Plateau()\n",
        more_prepare="accelerator.register_for_checkpointing(plateau)\n",
        step=_STEP + "plateau(accelerator.reduce(loss.detach(), 'mean').item(), optimizer)\n",
    ),
    Omission(
        "gradients_of_an_open_window",
        truth="Gradients are set to zero after the load, in the middle of an accumulation window.",
        where="after load_state: zero_grad",
        finding="gradients right after the load; weights at the end of the window (saved off its boundary)",
        after_load="""
if OMIT:
    for parameter in model.parameters():
        parameter.grad = None
else:
    for parameter, gradient in zip(model.parameters(), window):
        parameter.grad = gradient.clone()
""",
        more_build="window = []\n",
        more_prepare="""
accelerator.register_for_checkpointing(
    Kept(lambda: [one.grad.clone() for one in model.parameters() if one.grad is not None], window.extend)
)
""",
        step="""
loss = model(batch).square().mean()
accelerator.backward(loss / 4)
if count.steps % 4 == 3:
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    Omission(
        "batch_norm_statistics",
        truth="The running statistics of batch norm are reset after the load.",
        where="after load_state: reset_running_stats",
        finding="buffers 1.running_mean and 1.running_var right after the load",
        after_load="""
if OMIT:
    accelerator.unwrap_model(model)[1].reset_running_stats()
""",
    ),
    Omission(
        "buffer_that_is_not_persistent",
        truth="A running mean that inputs are centred by is a buffer with persistent=False.",
        where="Centred.__init__: register_buffer(persistent=False)",
        finding="the buffer 0.mean right after the load; the loss of the next step",
        definitions='''
class Centred(nn.Module):
    """Subtracts the running mean of the inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4), persistent=not OMIT)

    def forward(self, inputs):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0).detach()
        return inputs - self.mean
''',
        more_build="""
model = nn.Sequential(Centred(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
""",
    ),
    Omission(
        "average_of_the_weights",
        truth="The moving average of the weights, which the loss is compared with, is not registered.",
        where="register_for_checkpointing: the average is missing",
        finding="the loss of the first step after the load",
        more_build="""
teacher = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).eval()
teacher.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
""",
        more_prepare="""
if not OMIT:
    accelerator.register_for_checkpointing(teacher)
""",
        step="""
outputs = model(batch)
loss = outputs.square().mean() + (outputs - teacher(batch).detach() - 1).square().mean()
accelerator.backward(loss)
optimizer.step()
optimizer.zero_grad()
with torch.no_grad():
    for mean, now in zip(teacher.parameters(), accelerator.unwrap_model(model).parameters()):
        mean.lerp_(now, 0.1)
""",
    ),
    Omission(
        "step_counter",
        truth="The warm-up of the learning rate counts the steps of this process, not those of the run.",
        where="the variable `warm`, which starts at zero after each start",
        finding="the learning rate and weights of the first step after the load",
        after_load="warm = 0 if OMIT else count.steps\n",
        step="""
warm += 1
for group in optimizer.param_groups:
    group["lr"] = 0.05 * min(1.0, warm / 10)
"""
        + _STEP,
    ),
    Omission(
        "curriculum",
        truth="How much of each sample is used grows with the lowest loss so far, which is not saved.",
        where="register_for_checkpointing: the curriculum is missing",
        finding="the loss of the first step after the load",
        definitions='''
class Curriculum:
    """Uses one more column of the data after every third step."""

    def __init__(self):
        self.seen, self.columns = 0, 1

    def __call__(self, batch):
        self.seen += 1
        self.columns = min(4, 1 + self.seen // 3)
        return batch * (torch.arange(4) < self.columns)

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)
''',
        more_build="curriculum = Curriculum()\n",
        more_prepare="""
if not OMIT:
    accelerator.register_for_checkpointing(curriculum)
""",
        step="batch = curriculum(batch)\n" + _STEP,
    ),
    Omission(
        "generator_in_a_worker",
        truth="The data set augments by a generator of its own, whose place is lost with the worker process.",
        where="Augmented.__getitem__: the generator lives in the worker of the DataLoader",
        finding="batches (not sample ids) after the load; the loss of the first step after it",
        definitions='''
class Augmented(torch.utils.data.Dataset):
    """Adds noise to each sample."""

    def __init__(self, data):
        self.data, self.noise = data, np.random.default_rng(5)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        noise = self.noise if OMIT else np.random.default_rng(index)
        return self.data[index] + 0.1 * torch.from_numpy(noise.standard_normal(4)).float()
''',
        more_build="""
loader = torch.utils.data.DataLoader(
    Augmented(data), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
)
""",
    ),
    Omission(
        "generator_of_the_dropout",
        truth="Dropout draws from a generator of its own, which is not registered.",
        where="register_for_checkpointing: the generator is missing",
        finding="the loss of the first step after the load",
        definitions='''
class OwnDropout(nn.Module):
    """Dropout from a generator of its own."""

    def __init__(self, seed):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, inputs):
        return inputs * (torch.rand(inputs.shape, generator=self.generator) > 0.2) / 0.8
''',
        more_build="""
dropout = OwnDropout(7 + rank)
model[3] = dropout
""",
        more_prepare="""
if not OMIT:
    generator = dropout.generator
    accelerator.register_for_checkpointing(Kept(generator.get_state, generator.set_state))
""",
    ),
    Omission(
        "second_model",
        truth="A second model with its optimizer trains beside the first and is never prepared.",
        where="prepare and register_for_checkpointing: the second model is missing",
        finding="the loss of the first step after the load",
        more_build="""
torch.manual_seed(9)
critic = nn.Linear(1, 1)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(1 + rank)
""",
        more_prepare="""
if not OMIT:
    accelerator.register_for_checkpointing(critic, critic_optimizer)
""",
        step="""
outputs = model(batch)
loss = outputs.square().mean() + 0.3 * critic(outputs).mean()
accelerator.backward(loss)
optimizer.step()
optimizer.zero_grad()
critic_optimizer.zero_grad()
(critic(outputs.detach()) - batch[:, :1]).square().mean().backward()
critic_optimizer.step()
critic_optimizer.zero_grad()
""",
    ),
    Omission(
        "learning_rate_of_a_group",
        truth="The learning rate of the second param group is set to its first value after the load.",
        where="after load_state: param_groups[1]['lr']",
        finding="the learning rate of the second param group right after the load; its weights after the next step",
        more_build="""
groups = [{"params": model[:4].parameters()}, {"params": model[4:].parameters()}]
optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
""",
        after_load="""
if OMIT:
    optimizer.param_groups[1]["lr"] = 0.05
""",
        step=_STEP + 'optimizer.param_groups[1]["lr"] *= 0.9\n',
    ),
    Omission(
        "autocast_switched_on",
        truth="Autocasting to bfloat16 starts after three calm steps, which a variable of the loop remembers.",
        where="the variable `low`, which starts as False",
        finding="the loss of the first step after the load",
        after_load="low, calm = (False, 0) if OMIT else (count.steps >= 3, count.steps)\n",
        step="""
with torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
    loss = model(batch).float().square().mean()
accelerator.backward(loss)
optimizer.step()
optimizer.zero_grad()
calm += 1
low = low or calm >= 3
""",
    ),
)

CATALOGUE: Final = {omission.name: omission for omission in _OMISSIONS}
"""By name, the omissions."""
