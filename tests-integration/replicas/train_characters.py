"""What a replica of the tests runs to compare backends: a small network learns the characters of a text.

    train_characters.py FOLDER STEPS

When it has made the steps, it notes the loss with the weights of the run, and the bytes that went through the loopback
device so far.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_torch import Accelerator

DOCS = Path(__file__).parents[2] / "docs"
CONTEXT, WIDTH, BATCH = 8, 128, 64


def model_of(characters: int) -> nn.Module:
    """Guesses the next character from those before it.

    Bengio, Ducharme, Vincent, Jauvin: "A Neural Probabilistic Language Model" (JMLR 2003), over characters.
    """
    return nn.Sequential(
        nn.Embedding(characters, 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, characters),
    )


def loopback_bytes() -> int:
    """Bytes that the loopback device of this network namespace has sent."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[8])


def main(folder: Path, steps: int) -> None:
    """Train."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pages = sorted(page for page in DOCS.rglob("*.md") if "generated" not in page.parts)
    content = "".join(page.read_text(encoding="utf-8") for page in pages).encode("ascii", "ignore").decode()
    code = {character: number for number, character in enumerate(sorted(set(content)))}
    codes = torch.tensor([code[character] for character in content])
    windows = codes.unfold(0, CONTEXT + 1, 1)
    accelerator = Accelerator(cpu=True)
    model = model_of(len(code))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(windows), batch_size=BATCH, shuffle=True)
    )
    replica = os.environ.get("REPLICA_GROUP_ID", "0")
    progress, made = folder / f"progress-{replica}-{os.getpid()}", 0
    progress.write_text("0")
    while made < steps:
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients and not optimizer.step_was_skipped:
                    made = getattr(loader.share, "step", made) + 1
            if accelerator.sync_gradients:
                progress.write_text(str(made))
            if made >= steps:
                break
    with accelerator.global_weights(model), torch.no_grad():
        sample = windows[:: len(windows) // 4096]
        loss = nn.functional.cross_entropy(model(sample[:, :-1]), sample[:, -1]).item()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    result = {"loss": loss, "bytes": loopback_bytes(), "parameters": parameters, "time": time.time()}
    (folder / f"end-{replica}.json").write_text(json.dumps(result))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
