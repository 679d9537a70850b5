"""Trains with the Trainer of accmt, on data whose last batch is short, with accumulation if told so."""

from __future__ import annotations

import json
import os
import sys

import torch
from accmt import AcceleratorModule, HyperParameters, Trainer
from torch import nn
from torch.utils.data import TensorDataset

TOLD = json.loads(sys.argv[1])
os.makedirs(TOLD["folder"], exist_ok=True)
os.chdir(TOLD["folder"])


class Regression(AcceleratorModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.loss = nn.Linear(2, 1), nn.MSELoss()

    def training_step(self, batch):
        inputs, targets = batch
        return self.loss(self.model(inputs), targets)

    def validation_step(self, key, batch):
        inputs, targets = batch
        return {"loss": self.loss(self.model(inputs), targets)}


inputs = torch.arange(44.0).reshape(-1, 2) / 44
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
module = Regression()
trainer = Trainer(
    hps_config=HyperParameters(batch_size=4, epochs=3, optimizer="SGD", optim_kwargs={"lr": 0.1}),
    model_path="model",
    enable_checkpointing=False,
    disable_model_saving=True,
    shuffle_train=False,
    grad_accumulation_steps=TOLD.get("accumulation", 1),
    dataloader_num_workers=0,
)
trainer.fit(module, data, data)
weights = [value for parameter in module.model.parameters() for value in parameter.flatten().tolist()]
if os.environ.get("RANK", "0") == "0":
    print("RESULT " + json.dumps({"weights": weights}), flush=True)
