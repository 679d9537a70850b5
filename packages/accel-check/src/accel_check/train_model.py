"""The script that `accel estimate-memory --training` checks for a model: it makes two steps with an Accelerator.

train_model.py SOURCE OPTIONS OPTIMIZER SAMPLES TOKENS
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from accel_bigmodel.estimate import load_callable
from accel_state.errors import SettingError
from accel_state.settings.installed import Requirement
from accel_torch import Accelerator

__all__ = ("main", "training_case")

_CASE_REMEDY: Final = "Return (model, loss_function, batch), where loss_function(model, batch) returns a scalar."
_Case = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]


def training_case(source: str, options: Mapping[str, Any], samples: int, tokens: int) -> _Case:
    """A model, its loss function and one batch.

    Args:
        source: "module:function" or "file.py:function", or a folder or file with a transformers config.
        options: arguments for the function.
        samples: samples of a batch, for a config.
        tokens: tokens of a sample, for a config.

    Raises:
        SettingError: the function returns something else.
        Missing: transformers is needed and not installed.
    """
    failure = f"Cannot estimate the memory of training {source!r}."
    if ":" not in source:
        Requirement("transformers").demand(failure)
        return _from_config(source, samples, tokens)
    case: Any = load_callable(failure, source)(**options)
    if not (isinstance(case, tuple) and len(case) == 3 and isinstance(case[0], nn.Module) and callable(case[1])):
        raise SettingError(
            failure, f"The function returned a {type(case).__name__} of an unexpected form.", _CASE_REMEDY
        )
    return case


def _from_config(path: str, samples: int, tokens: int) -> _Case:
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
        batch = {"pixel_values": torch.randn(samples, channels, side, side)}
    else:
        batch = {"input_ids": torch.zeros(samples, tokens, dtype=torch.long)}
        if getattr(config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = torch.zeros_like(batch["input_ids"])
    return model, _mean_loss, batch


def _mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of logits over tokens or classes; the mean of the first output if there are no logits."""
    outputs = model(**batch)
    logits: Tensor | None = getattr(outputs, "logits", None)
    if logits is None:
        return outputs[0].float().mean()  # type: ignore[no-any-return]
    targets = torch.zeros(logits.shape[:-1], dtype=torch.long)
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def main(source: str, options: str, optimizer: str, samples: str, tokens: str) -> None:
    """Make two optimizer steps.

    Raises:
        SettingError: torch has no such optimizer.
    """
    candidate = getattr(torch.optim, optimizer, None)
    if not (isinstance(candidate, type) and issubclass(candidate, torch.optim.Optimizer)):
        raise SettingError(
            f"Cannot train with the optimizer {optimizer!r}.",
            "torch.optim has no optimizer of that name.",
            "Give the name of one, such as AdamW or SGD.",
        )
    accelerator = Accelerator()
    model, loss_function, batch = training_case(source, json.loads(options), int(samples), int(tokens))
    optimizer_class: Any = candidate
    model, stepped = accelerator.prepare(model, optimizer_class(one for one in model.parameters() if one.requires_grad))
    for _ in range(2):
        accelerator.backward(loss_function(model, batch))
        stepped.step()
        stepped.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
