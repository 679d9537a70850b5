"""Train a small GPT on paragraphs of text, character by character: padded, in batches by tokens, or packed.

    accel launch --cpu --num_processes 2 docs/tutorials/train_lines.py --batches tokens

Every paragraph counts exactly once in each epoch, and every character of a step counts equally, on any number of
processes.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from accel_torch import (
    Accelerator,
    DataLoaderConfiguration,
    PackedDataset,
    TokenBatchSampler,
    count_labels,
    packed_attention_mask,
    set_seed,
)

LONGEST = 256
"""Characters of a paragraph at most; also the tokens of a packed item."""
IGNORED = -100
"""The label of positions that have no next character."""


def paragraphs(count: int) -> list[dict[str, Tensor]]:
    """Paragraphs of the help pages that Python brings, as characters, each with the next one as its label."""
    texts = [text.strip() for topic in sorted(topics) for text in topics[topic].split("\n\n") if text.strip()]
    samples = []
    for text in texts[:count]:
        tokens = torch.tensor(list(text[:LONGEST].encode("ascii", "replace")))
        # The last character has no next one. So a label never lies in another paragraph, packed or not.
        samples.append({"input_ids": tokens, "labels": torch.cat([tokens[1:], torch.tensor([IGNORED])])})
    return samples


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(samples, tokens, width) to the same; without a mask each token attends to all earlier ones."""
        states = self.attention(self.before_attention(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = states.permute(2, 0, 3, 1, 4)
        values = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.projection(values.transpose(1, 2).flatten(2))
        out: Tensor = x + self.feed_forward(self.before_feed_forward(x))
        return out


class GPT(nn.Module):
    """A GPT of characters.

    Args:
        width: features of a token.
        depth: number of blocks.
    """

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(128, width), nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """The score of each next character: (samples, tokens) to (samples, tokens, 128)."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.characters(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        scores: Tensor = self.head(x)
        return scores


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch whose samples are padded to the longest; padding has no label."""
    fillers = {"input_ids": 0, "labels": IGNORED, "position_ids": 0, "sequence_ids": -1}
    keys = [key for key in fillers if key in samples[0]]
    return {key: pad_sequence([sample[key] for sample in samples], True, fillers[key]) for key in keys}


def loader_of(batches: str, samples: list[dict[str, Tensor]], size: int) -> DataLoader[Any]:
    """A loader of about `size` samples for each batch: "padded", by "tokens", or "packed"."""
    if batches == "padded":
        return DataLoader(samples, batch_size=size, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]
    lengths = [len(sample["input_ids"]) for sample in samples]
    tokens = size * sum(lengths) // len(lengths)
    if batches == "tokens":
        sampler = TokenBatchSampler(lengths, max(tokens, LONGEST))
        return DataLoader(samples, batch_sampler=sampler, collate_fn=padded)  # type: ignore[arg-type]
    packed: Any = PackedDataset(samples, lengths, LONGEST)  # type: ignore[arg-type]
    return DataLoader(packed, batch_size=max(tokens // LONGEST, 1), shuffle=True, collate_fn=padded)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of the characters of a batch."""
    mask = packed_attention_mask(batch["sequence_ids"], causal=True) if "sequence_ids" in batch else None
    scores = model(batch["input_ids"], batch.get("position_ids"), mask)
    return cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def train(options: argparse.Namespace) -> float:
    """Train, and return the mean loss of the last epoch."""
    set_seed(0)
    accelerator = Accelerator(cpu=options.cpu, dataloader_config=DataLoaderConfiguration(exact_epochs=True))
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader: Any = loader_of(options.batches, paragraphs(options.paragraphs), 32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    mean = float("nan")
    for epoch in range(options.epochs):
        # Sums of losses, of characters with a label, and of all places of the batches.
        totals = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
        for batch in loader:
            count = count_labels(batch)
            with accelerator.accumulate(model, weight=count):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if not loader.is_stand_in:
                totals += torch.stack([loss.detach() * count, count, torch.tensor(batch["labels"].numel())])
        total, characters, places = accelerator.reduce(totals, "sum").tolist()
        mean = total / characters
        accelerator.print(
            f"Epoch {epoch}: loss {mean:.3f}, {characters:.0f} characters in {len(loader)} steps, "
            f"{1 - characters / places:.0%} of the places without a label"
        )
    accelerator.end_training()
    return mean


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description="Train a small GPT on paragraphs of text.")
    parser.add_argument("--batches", choices=("padded", "tokens", "packed"), default="tokens")
    parser.add_argument("--paragraphs", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU also where there is a GPU")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
