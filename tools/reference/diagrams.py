"""Two pictures drawn from the real import graph: the layers of the packages, and the way of a batch through them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import grimp

from accelerate.names import NAMES
from reference.drawing import Arrow, Box, drawn
from reference.imports import package_edges, read_graph, reduced, supported
from reference.published import ROOT, Library, read_library

__all__ = ("DIAGRAMS", "Unsupported", "diagrams")

DIAGRAMS = ROOT / "docs" / "reference" / "diagrams"

_LAYERS = {
    # package: row, first and last column
    "accelerate": (0, 0, 3),
    "accel_torch": (1, 0, 3),
    "accel_ray": (1, 4, 4),
    "accel_torchft": (1, 5, 5),
    "accel_cli": (2, 3, 5),
    "accel_plugins": (3, 2, 3),
    "accel_tracking": (4, 0, 0),
    "accel_data": (4, 1, 1),
    "accel_bigmodel": (4, 2, 3),
    "accel_ops": (5, 1, 3),
    "accel_state": (6, 0, 3),
}

_SCRIPT = "your training loop"
_PATH = {
    # module: row, first and last column
    "accel_data.order": (0, 0, 1),
    "accel_data.sharding": (1, 0, 1),
    "accel_data.source": (2, 0, 1),
    "accel_data.loader": (3, 0, 0),
    "accel_data.dispatch": (3, 1, 1),
    "accel_ops.pending": (4, 1, 1),
    "accel_state.transport": (5, 1, 1),
    "accel_ops.conversion": (6, 0, 1),
    _SCRIPT: (7, 0, 1),
    "accel_plugins.strategy": (8, 0, 0),
    "accel_torch.metrics": (8, 1, 1),
    "accel_torch.step": (9, 0, 0),
    "accel_ops.collectives": (9, 1, 1),
}


class Step(NamedTuple):
    """A step of a batch, and the module in which the two ends meet: one of them, or a third that imports both."""

    source: str
    target: str
    by: str


_STEPS = (
    Step("accel_data.order", "accel_data.sharding", "accel_data.sharding"),
    Step("accel_data.sharding", "accel_data.source", "accel_data.source"),
    Step("accel_data.source", "accel_data.loader", "accel_data.loader"),
    Step("accel_data.loader", "accel_ops.conversion", "accel_data.loader"),
    Step("accel_data.source", "accel_data.dispatch", "accel_data.dispatch"),
    Step("accel_data.dispatch", "accel_ops.pending", "accel_data.dispatch"),
    Step("accel_ops.pending", "accel_state.transport", "accel_ops.pending"),
    Step("accel_state.transport", "accel_ops.conversion", "accel_data.dispatch"),
    Step("accel_plugins.strategy", "accel_torch.step", "accel_torch.step"),
    Step("accel_torch.metrics", "accel_ops.collectives", "accel_torch.metrics"),
)
_BETWEEN = frozenset({"accel_ops.pending", "accel_ops"})
"""What sends for a loader, and the package whose names are gathered at its top."""

_OF_THE_SCRIPT = (
    Arrow("accel_ops.conversion", _SCRIPT),
    Arrow(_SCRIPT, "accel_plugins.strategy"),
    Arrow(_SCRIPT, "accel_torch.metrics"),
)


class Unsupported(ValueError):
    """Raised when the picture shows a step that no import stands behind."""


def diagrams() -> dict[str, str]:
    """File name to picture."""
    library, graph = read_library(), read_graph()
    return {"layers.svg": _layers(library, graph), "batch.svg": _batch(library, graph)}


def _layers(library: Library, graph: grimp.ImportGraph) -> str:
    # The finder of `accelerate` imports the owners of its names by the table.
    owners = {source.partition(".")[0] for sources in NAMES.values() for source in sources}
    edges = reduced(package_edges(graph) | {("accelerate", owner) for owner in owners - {"accelerate"}})
    boxes = [Box(name, _said(library, name), *place) for name, place in _LAYERS.items()]
    about = "Arrows lead from a package to those it imports; an arrow that a longer way makes needless is left out."
    arrows = [Arrow(*edge) for edge in sorted(edges, key=lambda edge: (_LAYERS[edge[0]], _LAYERS[edge[1]]))]
    return drawn("The layers of accel", about, boxes, arrows)


def _batch(library: Library, graph: grimp.ImportGraph) -> str:
    boxes = [Box(name, _said(library, name), *place, outside=name == _SCRIPT) for name, place in _PATH.items()]
    about = "On the left each process reads its own samples; on the right the main process reads for all."
    return drawn("The way of a batch", about, boxes, [*_checked(graph), *_OF_THE_SCRIPT])


def _checked(graph: grimp.ImportGraph) -> Iterator[Arrow]:
    for step in _STEPS:
        if not supported(graph, *step, _BETWEEN):
            raise Unsupported(f"{step.by} does not bring {step.source} and {step.target} together any more")
        yield Arrow(step.source, step.target)


def _said(library: Library, name: str) -> str:
    """The first sentence of a docstring, as a caption."""
    if name == _SCRIPT:
        return "for batch in loader: loss = model(batch), accelerator.backward(loss), optimizer.step()"
    package, _, rest = name.partition(".")
    module = library[package][rest] if rest else library[package]
    assert module.docstring is not None, name
    return " ".join(module.docstring.value.partition("\n\n")[0].replace("`", "").split())
