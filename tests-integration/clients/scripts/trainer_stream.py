"""Evaluates streams without a length with the Trainer of transformers: python trainer_stream.py '{"folder": ...}'."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from tiny_text import tell
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.length):
            yield {"x": torch.tensor([index / 66, 1.0]), "labels": torch.tensor(float(index % 5))}


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.linear(x)[:, 0]
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def exact(length: int) -> float:
    samples = list(Stream(length))
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "labels")}
    return float(Regression()(**batch)["loss"])


told = json.loads(sys.argv[1])
arguments = TrainingArguments(told["folder"], per_device_eval_batch_size=8, use_cpu=True, report_to=[])
trainer = Trainer(Regression(), arguments)
lengths = told["lengths"]
losses = [trainer.evaluate(Stream(length))["eval_loss"] for length in lengths]
predictions = [len(trainer.predict(Stream(length)).predictions) for length in lengths]
tell(losses=losses, predictions=predictions, exact=[exact(length) for length in lengths])
