"""Which saved model is loaded into which prepared one: by names and shapes of the parameters, and by position."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash
from torch.nn import Module

from accel_plugins.checkpoint.files import FSDP_MODEL_NAME, sharded_model_name, shards_name, weights_name
from accel_plugins.parameters import canonical_name
from accel_state.errors import CheckpointError

__all__ = ("identity_of", "matched_models", "saved_models")

logger = logging.getLogger(__name__)


def identity_of(model: Module, *, shapes: bool) -> str:
    """A digest of the names and shapes of a model's parameters; equal for models of one configuration.

    Args:
        model: the user's model.
        shapes: False: names only, for models whose parameters have another shape on each process.

    Example:
        >>> import torch
        >>> identity_of(torch.nn.Linear(2, 3), shapes=True) == identity_of(torch.nn.Linear(2, 3), shapes=True)
        True
    """
    named = model.named_parameters(remove_duplicate=False)
    described = sorted(f"{canonical_name(name)} {tuple(value.shape) if shapes else ''}" for name, value in named)
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
    count = 0
    while any((folder / name).exists() for name in _names(count)):
        count += 1
    return [""] * count


def _names(index: int) -> tuple[str, ...]:
    """The names that the weights of a model may have."""
    safe, plain = weights_name(True, index), weights_name(False, index)
    return safe, plain, sharded_model_name(index), shards_name(FSDP_MODEL_NAME, index)


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
        indices = [saved.index(identity) for _, identity in prepared]
        if unread := [index for index in range(len(saved)) if index not in indices]:
            logger.warning("%s: %s not loaded, because no such model is prepared.", folder, _listed(unread))
        return indices
    if len(saved) == len(prepared) or not saved or (allow_unread and len(saved) > len(prepared)):
        return positions
    raise CheckpointError(
        f"Cannot load the models of {folder}.",
        f"It has {len(saved)} ({_listed(range(len(saved)))}), and {len(prepared)} are prepared "
        f"({', '.join(name for name, _ in prepared) or 'none'}); names and shapes do not say which "
        "ones are meant.",
        "Prepare the same models in the same order as when the checkpoint was saved, also those for evaluation. To "
        "load the first ones and ignore the rest, pass allow_unread=('models',).",
    )


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(f"model {index}" for index in indices)
