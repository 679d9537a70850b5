"""The model that `accel estimate-memory --training` trains: from a function of the user, or a transformers config."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from accel_bigmodel.estimate import load_callable
from accel_state.errors import SettingError
from accel_state.settings.installed import Requirement
from accel_torch.training_memory.trial import TrainingCase

__all__ = ("training_case",)

_HOW: Final = "Return (model, loss_function, batch), where loss_function(model, batch) returns a scalar."


def training_case(
    source: str, arguments: Mapping[str, Any], optimizer: str, batch_size: int, sequence_length: int
) -> TrainingCase:
    """Load "module:function" or "file.py:function", or a folder or file with a transformers config.

    Args:
        source: the text.
        arguments: arguments for the function.
        optimizer: name of a class of `torch.optim`.
        batch_size: samples of a batch, for a config.
        sequence_length: tokens of a sample, for a config.

    Raises:
        SettingError: the source or the optimizer does not exist.
        Missing: transformers is needed and not installed.
    """
    failure = f"Cannot estimate the memory of training {source!r}."
    made = getattr(torch.optim, optimizer, None)
    if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
        raise SettingError(
            failure, f"torch.optim has no optimizer {optimizer!r}.", "Give the name of one, such as AdamW or SGD."
        )
    if ":" in source:
        function = load_callable(failure, source)

        def build() -> Any:
            return _checked(failure, function(**arguments))

        return TrainingCase(build, made)
    if not Path(source).exists():
        raise SettingError(
            failure, "There is no such file or folder.", f"Give module:function, or a config.json. {_HOW}"
        )
    Requirement("transformers").demand(failure)
    return TrainingCase(lambda: _from_config(source, batch_size, sequence_length), made)


def _checked(failure: str, made: Any) -> Any:
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], Module) and callable(made[1])):
        raise SettingError(failure, f"The function returned a {type(made).__name__} of an unexpected form.", _HOW)
    return made


def _from_config(path: str, batch_size: int, sequence_length: int) -> Any:
    """A model of the first architecture of a config, its own loss, and a batch of its main input."""
    library: Any = importlib.import_module("transformers")
    config = library.AutoConfig.from_pretrained(path)
    # Training does not use a key-value cache.
    config.use_cache = False
    names = list(getattr(config, "architectures", None) or ())
    kind = getattr(library, names[0], None) if names else None
    model = library.AutoModel.from_config(config) if kind is None else kind(config)
    if model.main_input_name == "pixel_values":
        channels, side = getattr(config, "num_channels", 3), config.image_size
        batch = {"pixel_values": torch.randn(batch_size, channels, side, side)}
    else:
        batch = {"input_ids": torch.zeros(batch_size, sequence_length, dtype=torch.long)}
        if getattr(config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = torch.zeros_like(batch["input_ids"])
    return model, _mean_loss, batch


def _mean_loss(model: Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of logits over tokens or classes; the mean of the first output if there are no logits."""
    outputs = model(**batch)
    logits: Tensor | None = getattr(outputs, "logits", None)
    if logits is None:
        return outputs[0].float().mean()  # type: ignore[no-any-return]
    targets = torch.zeros(logits.shape[:-1], dtype=torch.long)
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
