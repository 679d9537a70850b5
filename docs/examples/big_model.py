"""Run a model whose weights are on the disk: built without memory, loaded block by block, in the order of its forward.

python big_model.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn

from accel_torch import infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch, save_weights

WIDTH, DEPTH = 256, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def main():
    torch.manual_seed(0)
    whole = Model().eval()
    inputs = torch.randn(4, WIDTH)
    with tempfile.TemporaryDirectory() as folder:
        save_weights(whole.state_dict(), f"{folder}/checkpoint", max_shard_size="512KB")

        with init_empty_weights():
            model = Model().eval()
        print("without memory:", all(weight.is_meta for weight in model.parameters()))
        # A quarter of the model may stay in memory; the rest is read from the disk whenever the forward needs it.
        size = sum(weight.numel() * weight.element_size() for weight in whole.parameters())
        places = infer_auto_device_map(
            model, max_memory={"cpu": size // 4, "disk": size}, no_split_module_classes=["Linear"]
        )
        model = load_checkpoint_and_dispatch(
            model, f"{folder}/checkpoint", device_map=places, offload_folder=f"{folder}/offloaded"
        )
        print("on the disk:", sum(place == "disk" for place in places.values()) > 0)
        with torch.no_grad():
            print("same result:", torch.equal(model(inputs), whole(inputs)))


if __name__ == "__main__":
    main()
