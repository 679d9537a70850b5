"""Train a small convolutional network on handwritten digits: a plain PyTorch loop with five changed lines.

    accel launch --cpu --num_processes 2 --mixed_precision bf16 docs/tutorials/train_digits.py

The five lines that make it run anywhere end in `# accel`. What else is new shows two more things: a checkpoint in the
middle of an epoch, and how a later run goes on from there with the losses it would have had.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_torch import Accelerator, DataLoaderConfiguration, set_seed, tqdm  # accel


def digits(train: bool) -> TensorDataset:
    """The digits that scikit-learn brings: images (n, 1, 8, 8) from 0 to 1, and labels; every fifth is for testing."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    in_test = torch.arange(len(pixels)) % 5 == 4
    chosen = ~in_test if train else in_test
    return TensorDataset(pixels[chosen], torch.tensor(labels)[chosen])


def network() -> nn.Module:
    """Two convolutions and a linear layer; (n, 1, 8, 8) to (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


class Progress:
    """How far the training is; a registered object, so that a checkpoint holds it."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


def train(options: argparse.Namespace) -> float:
    """Train, evaluate, and return the share of test digits that were recognised."""
    set_seed(options.seed)
    accelerator = Accelerator(  # accel
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_dir=options.output,
        log_with="jsonl",
    )
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    train_loader = DataLoader(digits(train=True), batch_size=32, shuffle=True)
    test_loader = DataLoader(digits(train=False), batch_size=64)
    steps = options.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(  # accel
        model, optimizer, train_loader, test_loader, scheduler
    )
    # Each process has samples of its own, and drops elements of its own.
    set_seed(options.seed, device_specific=True)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    accelerator.init_trackers("digits", config=vars(options))
    if options.resume_from:
        accelerator.load_state(options.resume_from)
        accelerator.print(f"Resumed in epoch {progress.epoch} after batch {progress.batch}.")

    checkpoint = Path(options.output) / "middle"
    middle = (options.epochs // 2, len(train_loader) // 2)
    bar = tqdm(total=options.epochs * len(train_loader), desc="training", unit="batch")
    bar.update(progress.epoch * len(train_loader) + progress.batch)
    model.train()
    for epoch in range(progress.epoch, options.epochs):
        train_loader.set_epoch(epoch)
        remaining = accelerator.skip_first_batches(train_loader, progress.batch)
        for images, labels in remaining:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)  # accel
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            progress.batch += 1
            bar.update()
            accelerator.log({"loss": loss.item()}, step=epoch * len(train_loader) + progress.batch)
            if (epoch, progress.batch) == middle:
                accelerator.save_state(str(checkpoint))
        progress.epoch, progress.batch = epoch + 1, 0
    bar.close()

    accuracy = evaluate(accelerator, model, test_loader)
    accelerator.log({"accuracy": accuracy})
    accelerator.end_training()
    accelerator.print(f"Test accuracy: {accuracy:.2%}")
    accelerator.print(f"Checkpoint: {checkpoint}")
    return accuracy


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """Share of the digits of a loader that the model recognises, counted over all processes, each digit once."""
    model.eval()
    right = total = 0
    for images, labels in loader:
        with torch.no_grad():
            guesses = model(images).argmax(dim=-1)
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))  # accel
        right += int((guesses == labels).sum())
        total += len(labels)
    return right / total


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/digits", help="folder for checkpoints and logs")
    parser.add_argument("--resume_from", help="checkpoint to go on from")
    options = parser.parse_args()
    accuracy = train(options)
    if accuracy <= 0.95:
        raise SystemExit(f"The test accuracy is {accuracy:.2%}; more than 95 % was expected.")


if __name__ == "__main__":
    main()
