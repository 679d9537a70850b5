"""Gradients of an unfinished accumulation window, which a checkpoint must hold for the resume to be exact.

Each process has partial gradients of its own, so each writes a file of its own. Checkpoints made between two windows
have none of these files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import Module

from accel_bigmodel.weight_files import load_weights_file
from accel_plugins.checkpoint.files import gradients_name
from accel_state.errors import CheckpointError

__all__ = ("held_gradients", "load_gradients")


def held_gradients(models: Sequence[Module]) -> dict[str, torch.Tensor]:
    """The gradients that the parameters of some models hold, by index of the model and name."""
    return {
        name: parameter.grad.detach() for name, parameter in _parameters(models).items() if parameter.grad is not None
    }


def load_gradients(models: Sequence[Module], folder: Path, rank: int) -> None:
    """Give parameters the gradients they had; where none were saved, they have none afterwards.

    Raises:
        CheckpointError: other processes have partial gradients and this one has not, or they are those of other models.
    """
    path = folder / gradients_name(rank)
    parameters = _parameters(models)
    held: dict[str, torch.Tensor] = {}
    if path.is_file():
        held = load_weights_file(path)
    elif any(folder.glob(gradients_name(0).replace("_0", "_*"))):
        raise CheckpointError(
            f"Cannot restore the gradients of process {rank} in an unfinished accumulation window from {folder}.",
            f"{path.name} is not there, while other processes have such a file.",
            "Resume with as many processes as saved it, or from a checkpoint made at the end of a window.",
        )
    _check(path, held, parameters)
    for name, parameter in parameters.items():
        parameter.grad = held[name].to(parameter.device) if name in held else None


def _parameters(models: Sequence[Module]) -> dict[str, torch.nn.Parameter]:
    return {f"{index}.{name}": value for index, model in enumerate(models) for name, value in model.named_parameters()}


def _check(path: Path, held: dict[str, torch.Tensor], parameters: dict[str, torch.nn.Parameter]) -> None:
    wrong = [name for name, value in held.items() if name not in parameters or parameters[name].shape != value.shape]
    if wrong:
        raise CheckpointError(
            f"Cannot restore partial gradients from {path}.",
            f"The prepared models have no parameter of that name and shape: {', '.join(wrong[:3])}.",
            "Prepare the models that were saved, in the same order.",
        )
