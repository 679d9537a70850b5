"""Whether a checkpoint and a model belong together: their names and shapes compared before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from accel_state.errors import CheckpointError, ShapeMismatch

__all__ = ("LoadReport", "compare_names", "own_tensors", "refuse_empty")

_log = logging.getLogger(__name__)


@dataclass
class LoadReport:
    """What a load found: names that the model has and the checkpoint does not, and the other way round."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a checkpoint of the model holds, by name; every name of a tied one."""
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def compare_names(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[Path, tuple[int, ...]]],
    tied: Iterable[Sequence[str]],
    strict: bool,
) -> LoadReport:
    """Compare what files hold with what a model has.

    A tied weight is missing only when no name of its group is there.

    Raises:
        ShapeMismatch: shapes differ.
        CheckpointError: names differ and `strict` is set.
    """
    for name, (path, shape) in shapes.items():
        own = tensors.get(name)
        if own is not None and tuple(own.shape) != shape:
            raise ShapeMismatch(
                f"Load {name!r} from {str(path)!r} into {type(model).__name__}.",
                f"The file has shape {shape}, the model {tuple(own.shape)}. Nothing was loaded.",
                "Load weights that were made for this architecture.",
            )
    known = {name for names in tied if any(one in shapes for one in names) for name in names}
    report = LoadReport(
        missing=[name for name in tensors if name not in shapes and name not in known],
        unexpected=[name for name in shapes if name not in tensors and not name.endswith("_extra_state")],
    )
    if strict and (report.missing or report.unexpected):
        raise CheckpointError(
            f"Load a checkpoint strictly into {type(model).__name__}.",
            f"Missing: {_listed(report.missing)}. Unexpected: {_listed(report.unexpected)}. Nothing was loaded.",
            "Load the checkpoint of this model, or pass strict=False.",
        )
    for what, names in (("does not have", report.missing), ("has and the model does not use", report.unexpected)):
        if names:
            _log.warning("Weights that the checkpoint %s: %s.", what, _listed(names))
    return report


def refuse_empty(model: nn.Module, report: LoadReport, checkpoint: object) -> None:
    """Refuse a model that cannot compute, because the checkpoint lacked weights and it has none of its own.

    Raises:
        CheckpointError: weights that were missing are on the meta device.
    """
    tensors = own_tensors(model)
    lost = [name for name in report.missing if tensors[name].is_meta]
    if lost:
        raise CheckpointError(
            f"Load {type(model).__name__} from {str(checkpoint)!r}.",
            f"{len(lost)} of its weights are not there and stayed empty: {_listed(lost)}.",
            "Name the checkpoint of this very model, or make these weights before it is loaded.",
        )


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - 10} more" if len(names) > 10 else ""
    return (", ".join(names[:10]) or "none") + more
