"""Two pictures drawn from the real import graph: the layers of the packages, and the way of a batch through them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import NamedTuple

import grimp

from accelerate.names import NAMES
from reference.docstrings import opening
from reference.drawing import Arrow, Box, drawn
from reference.published import LIBRARY, ROOT

__all__ = ("DIAGRAMS", "Unsupported", "diagrams", "package_edges", "reduced", "supported")

DIAGRAMS = ROOT / "docs" / "reference" / "diagrams"

Edges = frozenset[tuple[str, str]]

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
    graph = grimp.build_graph(*LIBRARY, cache_dir=None)
    return {"layers.svg": _layers(graph), "batch.svg": _batch(graph)}


def _layers(graph: grimp.ImportGraph) -> str:
    # The finder of `accelerate` imports the owners of its names by the table.
    owners = {source.partition(".")[0] for sources in NAMES.values() for source in sources}
    edges = reduced(package_edges(graph) | {("accelerate", owner) for owner in owners - {"accelerate"}})
    boxes = [Box(name, _said(name), *place) for name, place in _LAYERS.items()]
    about = "Arrows lead from a package to those it imports; an arrow that a longer way makes needless is left out."
    arrows = [Arrow(*edge) for edge in sorted(edges, key=lambda edge: (_LAYERS[edge[0]], _LAYERS[edge[1]]))]
    return drawn("The layers of accel", about, boxes, arrows)


def _batch(graph: grimp.ImportGraph) -> str:
    boxes = [Box(name, _said(name), *place, outside=name == _SCRIPT) for name, place in _PATH.items()]
    about = "On the left each process reads its own samples; on the right the main process reads for all."
    return drawn("The path of a batch", about, boxes, [*_checked(graph), *_OF_THE_SCRIPT])


def _checked(graph: grimp.ImportGraph) -> Iterator[Arrow]:
    for step in _STEPS:
        if not supported(graph, *step, _BETWEEN):
            raise Unsupported(f"{step.by} does not bring {step.source} and {step.target} together any more")
        yield Arrow(step.source, step.target)


def _said(name: str) -> str:
    """The first sentence of a docstring, as a caption."""
    if name == _SCRIPT:
        return "for batch in loader: loss = model(batch), accelerator.backward(loss), optimizer.step()"
    return " ".join(opening(import_module(name)).partition("\n\n")[0].replace("`", "").split())


def package_edges(graph: grimp.ImportGraph) -> Edges:
    """Which package imports which; what only a package's test kit imports is an extra, and left out."""
    found = set()
    for module in graph.modules:
        if ".testing" not in module:
            for imported in graph.find_modules_directly_imported_by(module):
                found.add((module.partition(".")[0], imported.partition(".")[0]))
    return frozenset((upper, lower) for upper, lower in found if upper != lower)


def reduced(edges: Edges) -> Edges:
    """Without edges that a longer way goes too."""
    return frozenset(edge for edge in edges if not _reaches(*edge, edges - {edge}))


def _reaches(source: str, target: str, edges: Edges) -> bool:
    seen: set[str] = set()
    waiting = [source]
    while waiting:
        here = waiting.pop()
        if here == target:
            return True
        following = {lower for upper, lower in edges if upper == here} - seen
        seen |= following
        waiting += sorted(following)
    return False


def supported(graph: grimp.ImportGraph, one: str, other: str, by: str, between: frozenset[str]) -> bool:
    """Whether two modules or packages know of each other.

    Args:
        graph: the imports.
        one: a module or package.
        other: another one.
        by: where the two meet: one of them, which imports the other, or a third, which imports both.
        between: modules through one of which an import may go.
    """
    if by in (one, other):
        return _imports(graph, by, other if by == one else one, between)
    return all(_imports(graph, by, end, between) for end in (one, other))


def _imports(graph: grimp.ImportGraph, importer: str, imported: str, between: frozenset[str]) -> bool:
    """Whether a module imports another or something below it, directly or through one of some modules."""
    wanted = {imported, *graph.find_descendants(imported)}
    reached = graph.find_modules_directly_imported_by(importer)
    through = (graph.find_modules_directly_imported_by(step) for step in reached & between)
    return bool(wanted & reached) or any(wanted & further for further in through)
