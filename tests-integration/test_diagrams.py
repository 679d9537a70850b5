"""The diagrams of the documents show what the packages import, and a change of that is noticed."""

from __future__ import annotations

from pathlib import Path

import grimp
import pytest

import draw_diagrams
from reference.diagrams import diagrams, package_edges, reduced, supported
from reference.drawing import Arrow, Blocked, Box, drawn

A = Box("a", "the first", 0, 0, 1)
B = Box("b", "the second", 1, 0, 0)
C = Box("c", "the third", 2, 0, 1)


def graph_of(*imports: tuple[str, str]) -> grimp.ImportGraph:
    """A graph of modules that import each other."""
    graph = grimp.ImportGraph()
    for importer, imported in imports:
        graph.add_module(importer)
        graph.add_module(imported)
        graph.add_import(importer=importer, imported=imported)
    return graph


@pytest.fixture(scope="module")
def pictures() -> dict[str, str]:
    """The diagrams of what is imported now."""
    return diagrams()


@pytest.fixture
def drawing(pictures: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool, with what was read once."""
    monkeypatch.setattr(draw_diagrams, "diagrams", lambda: pictures)


@pytest.mark.usefixtures("drawing")
def test_the_diagrams_show_what_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    assert draw_diagrams.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.usefixtures("drawing")
def test_a_diagram_that_differs_is_named_and_drawn_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert draw_diagrams.main([], tmp_path) == 0
    assert draw_diagrams.main(["--check"], tmp_path) == 0
    (tmp_path / "layers.svg").write_text("<svg/>", encoding="utf-8")
    assert draw_diagrams.main(["--check"], tmp_path) == 1
    assert "layers.svg is not what is true" in capsys.readouterr().err


def test_edges_are_those_of_packages_without_their_test_kits() -> None:
    graph = graph_of(("up.one", "down.two"), ("up.one", "up.three"), ("up.testing.kit", "aside.four"))
    assert package_edges(graph) == {("up", "down")}


def test_reduced_leaves_out_edges_that_longer_paths_imply() -> None:
    assert reduced(frozenset({("a", "b"), ("b", "c"), ("a", "c"), ("a", "d")})) == {("a", "b"), ("b", "c"), ("a", "d")}


@pytest.mark.parametrize(
    ("one", "other", "by", "known"),
    [
        ("a.x", "b.y", "a.x", True),
        ("b.y", "a.x", "b.y", False),
        ("b.y", "c.z", "a.x", True),
        ("a.x", "b", "a.x", True),
        ("b.y", "d.w", "a.x", False),
    ],
)
def test_a_step_needs_an_import(one: str, other: str, by: str, known: bool) -> None:
    graph = graph_of(("a.x", "b.y"), ("a.x", "m"), ("m", "c.z"), ("c.z", "d.w"), ("b", "d.w"))
    assert supported(graph, one, other, by, frozenset({"m"})) is known


def test_an_arrow_goes_around_the_boxes_between() -> None:
    picture = drawn("Three", "An order.", [A, B, C], [Arrow("a", "b"), Arrow("a", "c")])
    first, second = (line.split('d="M')[1].split()[0] for line in picture.splitlines() if 'class="arrow"' in line)
    assert int(first) < B.left + B.width < int(second)
    assert "<title>Three</title>" in picture


@pytest.mark.parametrize("arrow", [Arrow("c", "a"), Arrow("b", "d"), Arrow("a", "e")])
def test_an_arrow_without_a_way_is_refused(arrow: Arrow) -> None:
    aside, below = Box("d", "beside", 2, 2, 2), Box("e", "under the second", 3, 0, 0)
    with pytest.raises(Blocked, match=f"from {arrow.source} down to {arrow.target}"):
        drawn("Five", "Not to be drawn.", [A, B, C, aside, below], [arrow])


def test_text_cannot_break_the_picture() -> None:
    assert "a &lt;b&gt; &amp; c" in drawn("One", "It.", [Box("x", "a <b> & c", 0, 0, 0)], [])
