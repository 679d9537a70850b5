"""What a replica of the tests runs to compare backends: a small GPT learns the characters of a text.

    train_characters.py FOLDER STEPS

When it has made the steps, it notes the loss of text that it has not seen, with the weights of the run, and the bytes
that went through the loopback device so far.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from accel_torch import Accelerator
from accel_torchft.elastic import share_of_batch

DOCS = Path(__file__).parents[2] / "docs"
CONTEXT, WIDTH, LAYERS, HEADS, BATCH, WARM_UP = 32, 64, 2, 4, 16, 100


class CharGPT(nn.Module):
    """Predicts each next character.

    Args:
        characters: how many different ones there are.
    """

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of texts of shape (batch, CONTEXT + 1)."""
        hidden = self.tokens(text[:, :-1]) + self.places.weight
        logits = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def warm_up_and_cosine(batches: int, warm_up: int, batch: int) -> float:
    """The factor of the learning rate after so many of all batches."""
    return min(1.0, (batch + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * min(batch / batches, 1.0)))


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
    cut = len(codes) * 19 // 20
    windows, held_out = codes[:cut].unfold(0, CONTEXT + 1, CONTEXT // 4), codes[cut:].unfold(0, CONTEXT + 1, CONTEXT)
    accelerator = Accelerator(cpu=True)
    model = CharGPT(len(code))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    groups = int(os.environ.get("NUM_REPLICA_GROUPS", "2"))
    schedule = partial(warm_up_and_cosine, steps * groups, WARM_UP * groups)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model,
        optimizer,
        torch.optim.lr_scheduler.LambdaLR(optimizer, schedule),
        DataLoader(TensorDataset(windows), batch_size=BATCH, shuffle=True),
    )
    replica = os.environ.get("REPLICA_GROUP_ID", "0")
    progress, made = folder / f"progress-{replica}-{os.getpid()}", 0
    progress.write_text("0")
    while made < steps:
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients and not optimizer.step_was_skipped:
                    share = share_of_batch(loader)
                    made = (made if share is None else share.step) + 1
            if accelerator.sync_gradients:
                progress.write_text(str(made))
            if made >= steps:
                break
    with accelerator.global_weights(model), torch.no_grad():
        model.eval()
        parts = held_out.split(512)
        loss = sum(model(part).item() * len(part) for part in parts) / len(held_out)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    result = {"loss": loss, "bytes": loopback_bytes(), "parameters": parameters, "time": time.time()}
    (folder / f"end-{replica}.json").write_text(json.dumps(result))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
