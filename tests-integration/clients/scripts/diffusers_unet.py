"""Trains a tiny UNet of diffusers to remove noise: python diffusers_unet.py '{"folder": ..., "accumulation": 1}'."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from tiny_text import tell
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration


def unet() -> UNet2DModel:
    torch.manual_seed(3)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    size = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    return UNet2DModel(in_channels=3, out_channels=3, attention_head_dim=8, **blocks, **size)


def trained(accelerator: Accelerator, noise: DDPMScheduler, folder: Path) -> tuple[Any, list[float]]:
    model = unet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(7)
    loader = DataLoader(TensorDataset(torch.rand(36, 3, 8, 8)), batch_size=4, shuffle=True)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 18)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    average = EMAModel(accelerator.unwrap_model(model).parameters(), decay=0.9)
    accelerator.register_for_checkpointing(scheduler)
    accelerator.init_trackers("unet")
    numbers = torch.Generator().manual_seed(11 + accelerator.process_index)
    losses: list[float] = []
    for _ in range(2):
        for (clean,) in loader:
            added = torch.randn(clean.shape, generator=numbers)
            steps = torch.randint(0, 50, (len(clean),), generator=numbers)
            with accelerator.accumulate(model):
                predicted = model(noise.add_noise(clean, added, steps), steps).sample
                loss = torch.nn.functional.mse_loss(predicted.float(), added)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(accelerator.unwrap_model(model).parameters())
            losses.append(accelerator.gather(loss.detach()[None]).mean().item())
            accelerator.log({"loss": losses[-1]}, step=len(losses))
    accelerator.save_state(str(folder / "state"))
    average.copy_to(accelerator.unwrap_model(model).parameters())
    return model, losses


def images(pipeline: DDPMPipeline) -> float:
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(batch_size=2, num_inference_steps=3, generator=torch.manual_seed(0), output_type="np").images
    return float(made.astype("float64").sum())


def in_pieces(here: Path) -> DDPMPipeline:
    """The pipeline with its model in pieces on the CPU and on the disk."""
    pieces = {name: "cpu" for name, _ in unet().named_children()} | {"mid_block": "disk", "up_blocks": "disk"}
    offload = str(here.parent / "offload")
    model = UNet2DModel.from_pretrained(here / "unet", device_map=pieces, offload_folder=offload)
    return DDPMPipeline(unet=model, scheduler=DDPMScheduler.from_pretrained(here / "scheduler"))


def by_model(here: Path) -> DDPMPipeline:
    pipeline = DDPMPipeline.from_pretrained(here)
    pipeline.enable_model_cpu_offload(device="cpu")
    return pipeline


def by_layer(here: Path) -> DDPMPipeline:
    pipeline = DDPMPipeline.from_pretrained(here)
    pipeline.enable_sequential_cpu_offload(device="cpu")
    return pipeline


PLACES: dict[str, Callable[[Path], DDPMPipeline]] = {
    "whole": DDPMPipeline.from_pretrained,
    "in pieces": in_pieces,
    "offloaded by model": by_model,
    "offloaded by layer": by_layer,
}


def attempted(place: Callable[[Path], DDPMPipeline], here: Path) -> float | str:
    """The sum of images made by the saved pipeline, or the name of the error that came."""
    try:
        return images(place(here))
    except Exception as error:
        return type(error).__name__


def main(folder: str, accumulation: int = 1, precision: str = "no") -> None:
    here = Path(folder)
    project = ProjectConfiguration(project_dir=folder, logging_dir=str(here / "logs"))
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation, project_config=project
    )
    noise = DDPMScheduler(num_train_timesteps=50)
    model, losses = trained(accelerator, noise, here)
    sums: dict[str, float | str] = {}
    if accelerator.is_main_process:
        pipeline = DDPMPipeline(unet=accelerator.unwrap_model(model, keep_fp32_wrapper=False), scheduler=noise)
        pipeline.save_pretrained(here / "pipeline")
        sums = {name: attempted(place, here / "pipeline") for name, place in PLACES.items()}
    accelerator.wait_for_everyone()
    tell(losses=losses, images=sums, files=sorted(path.name for path in (here / "state").iterdir() if path.is_file()))
    accelerator.end_training()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
