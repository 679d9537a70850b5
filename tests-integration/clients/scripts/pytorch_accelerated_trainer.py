"""Trains and evaluates with the Trainer of pytorch-accelerated, on data whose last batch is short."""

from __future__ import annotations

import json
import os
import sys

os.environ["ACCELERATE_USE_CPU"] = "true"  # before the original is imported

import torch
from pytorch_accelerated import Trainer
from pytorch_accelerated.callbacks import TrainerCallback
from torch import nn
from torch.utils.data import TensorDataset

from accelerate.utils import gather_object

TOLD = json.loads(sys.argv[1])


class Sizes(TrainerCallback):
    def __init__(self):
        self.train, self.evaluate = [], []

    def on_train_step_end(self, trainer, batch, batch_output, **others):
        self.train.append(len(batch[0]))

    def on_eval_step_end(self, trainer, batch, batch_output, **others):
        self.evaluate.append(len(batch[0]))


torch.manual_seed(0)
model, sizes = nn.Linear(2, 1), Sizes()
inputs = torch.arange(44.0).reshape(-1, 2) / 44
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = Trainer(model, loss_func=nn.MSELoss(), optimizer=optimizer, callbacks=[sizes])
trainer.train(
    train_dataset=data,
    eval_dataset=data,
    num_epochs=2,
    per_device_batch_size=4,
    train_dataloader_kwargs={"shuffle": False, "num_workers": 0, "drop_last": False},
    eval_dataloader_kwargs={"shuffle": False, "num_workers": 0},
)
everyones = gather_object([[sizes.train, sizes.evaluate]])
history = {name: trainer.run_history.get_metric_values(name) for name in trainer.run_history.get_metric_names()}
weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
if trainer._accelerator.is_main_process:
    print("RESULT " + json.dumps({"sizes": everyones, "history": history, "weights": weights}), flush=True)
