"""Files of a real checkpoint with some bytes changed are read as plain data or refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.shards import names_in
from accel_state.errors import AccelError
from accel_testing.fresh import fresh
from accel_torch import Accelerator

ROUNDS = 250


class Kept:
    """A registered object with data of numpy."""

    def state_dict(self) -> dict[str, Any]:
        return {"mean": numpy.ones(3), "count": numpy.int64(4), "name": "kept", "seen": {1, 2}, "last": b"abc"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with fresh():
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(3, 2)
        prepared, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
        accelerator.backward(prepared(torch.ones(1, 3)).sum())
        optimizer.step()
        accelerator.register_for_checkpointing(Kept())
        accelerator.save_state(str(folder / "state"))
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"weight": torch.ones(4), "of": [1, 2]}, checkpoint_id=folder / "shards", no_dist=True)
    return folder


def changed(content: bytes, draw: random.Random) -> bytes:
    """Some bytes flipped, cut out, or put in."""
    text = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        at = draw.randrange(len(text))
        kind = draw.randrange(4)
        if kind < 2:
            text[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            del text[at : at + draw.choice((1, 4, 100))]
        else:
            text[at:at] = bytes(draw.randrange(256) for _ in range(4))
    return bytes(text)


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "states of generators": ("state/random_states_0.pkl", pickled.read),
    "an optimizer": ("state/optimizer.bin", pickled.read),
    "a registered object": ("state/custom_checkpoint_0.pkl", pickled.read),
    "a description": ("shards/.metadata", lambda path: names_in(path.parent)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", READERS)
def test_changed_files_are_read_or_refused(saved: Path, tmp_path: Path, what: str) -> None:
    name, read = READERS[what]
    content = (saved / name).read_bytes()
    path = tmp_path / Path(name).name
    draw = random.Random(len(what))
    # Most of a file is a few large tensors: change the pickle more often than those.
    pickle_at = max(0, content.find(b"\x80\x02")), min(len(content), content.find(b"PK\x07\x08") % len(content))
    refused = 0
    assert pickle_at[0] < pickle_at[1]
    for round_ in range(ROUNDS):
        if round_ % 2:
            begin, end = pickle_at
            path.write_bytes(content[:begin] + changed(content[begin:end], draw) + content[end:])
        else:
            path.write_bytes(changed(content, draw))
        try:
            read(path)
        except AccelError:
            refused += 1
    path.write_bytes(content)
    read(path)
    assert refused > ROUNDS / 10
