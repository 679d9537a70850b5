"""Which saved model is loaded into which prepared one: by names and shapes of the weights, and by position."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash
from torch.nn import Module

from accel_bigmodel.weight_files.metadata import read_header
from accel_plugins.checkpoint.files import FSDP_MODEL_NAME, sharded_model_name, shards_name, weights_name
from accel_plugins.checkpoint.parts import plain_state_dict
from accel_state.errors import CheckpointError

__all__ = ("identity_of", "matched_models", "saved_models")

logger = logging.getLogger(__name__)


def identity_of(model: Module) -> str:
    """A digest of the names and shapes of a model's weights; equal for models of one configuration.

    Args:
        model: the user's model.

    Example:
        >>> import torch
        >>> identity_of(torch.nn.Linear(2, 3)) == identity_of(torch.nn.Linear(2, 3))
        True
    """
    return _digest({name: tuple(value.shape) for name, value in plain_state_dict(model).items()})


def _digest(shapes: Mapping[str, Sequence[int]]) -> str:
    described = sorted(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    return xxhash.xxh3_64_hexdigest("\n".join(described).encode())


def saved_models(folder: Path, facts: Mapping[str, Any]) -> list[str]:
    """The identities of the models in a checkpoint, in order; of those that are not known, an empty text.

    Args:
        folder: the checkpoint.
        facts: those of its manifest; empty for a folder of another library.
    """
    recorded = facts.get("models")
    if isinstance(recorded, list) and all(isinstance(one, str) for one in recorded):
        return recorded
    found: list[str] = []
    while (identity := _identity_in(folder, len(found))) is not None:
        found.append(identity)
    return found


def _identity_in(folder: Path, index: int) -> str | None:
    """The identity of a saved model, empty if it is not known; None if there is none."""
    safe = folder / weights_name(True, index)
    if safe.is_file():
        try:
            return _digest({name: entry.shape for name, entry in read_header(safe).entries.items()})
        except CheckpointError:
            return ""
    others = (weights_name(False, index), sharded_model_name(index), shards_name(FSDP_MODEL_NAME, index))
    return "" if any((folder / name).exists() for name in others) else None


def matched_models(
    folder: Path, saved: Sequence[str], prepared: Sequence[tuple[str, str]], *, allow_unread: bool
) -> list[int]:
    """The index of the saved model for each prepared one.

    Args:
        folder: the checkpoint, for messages.
        saved: the identities of the saved models.
        prepared: name of the class and identity of each prepared model.
        allow_unread: whether saved models may remain that nobody reads.

    Raises:
        CheckpointError: there are more or fewer saved models, and names and shapes do not say which ones are meant.
    """
    own, inside = Counter(identity for _, identity in prepared), Counter(saved)
    positions = list(range(len(prepared)))
    if all(own[identity] == inside[identity] == 1 for _, identity in prepared):
        found = [saved.index(identity) for _, identity in prepared]
        if unread := [index for index in range(len(saved)) if index not in found]:
            logger.warning("%s: %s not loaded, because no such model is prepared.", folder, _listed(unread))
        return found
    if len(saved) == len(prepared) or not saved or (allow_unread and len(saved) > len(prepared)):
        return positions
    raise CheckpointError(
        f"Cannot load the models of {folder}.",
        f"It has {len(saved)} ({_listed(range(len(saved)))}), and {len(prepared)} are prepared "
        f"({', '.join(name for name, _ in prepared) or 'none'}); names and shapes of their weights do not say which "
        "ones are meant.",
        "Prepare the same models in the same order as when the checkpoint was saved, also those for evaluation. To "
        "load the first ones and ignore the rest, pass allow_unread=('models',).",
    )


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(f"model {index}" for index in indices)
