"""The graph of what imports what among the packages, as it really is."""

from __future__ import annotations

import grimp

from reference.published import LIBRARY

__all__ = ("package_edges", "read_graph", "reduced", "supported")

Edges = frozenset[tuple[str, str]]


def read_graph() -> grimp.ImportGraph:
    """Every import between our modules."""
    return grimp.build_graph(*LIBRARY, cache_dir=None)


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
