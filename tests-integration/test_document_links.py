"""The check of links passes on links that lead somewhere, and names those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_links

GOOD = """
# The first page

[a file](docs/second.md), [a heading](docs/second.md#the-second-page), [here](#the-first-page),
[elsewhere](https://example.org/nothing), `[code](nowhere.md)`
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two documents whose links are good."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(GOOD, encoding="utf-8")
    (tmp_path / "docs/second.md").write_text("## The second page\n[back](../README.md)\n", encoding="utf-8")
    return tmp_path


def test_good_links_pass(folder: Path) -> None:
    assert check_links.main([str(folder)]) == 0


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("docs/third.md", "there is no such file"),
        ("docs/second.md#the-third-page", "no such heading"),
        ("#nowhere", "no such heading"),
    ],
)
def test_a_broken_link_is_named(folder: Path, capsys: pytest.CaptureFixture[str], link: str, words: str) -> None:
    (folder / "README.md").write_text(f"{GOOD}\n[broken]({link})\n", encoding="utf-8")
    assert check_links.main([str(folder)]) == 1
    told = capsys.readouterr().err
    assert link in told
    assert words in told


def test_links_of_the_package_index_name_the_repository(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = "https://example.org/project"
    (folder / "pyproject.toml").write_text(f'[tool.accel]\nrepository = "{address}"\n', encoding="utf-8")
    readme = folder / "packages/one/README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text(f"[good]({address}/blob/main/docs/second.md#the-second-page)\n", encoding="utf-8")
    assert check_links.main([str(folder)]) == 0
    readme.write_text(f"[relative](../../README.md) [gone]({address}/blob/main/docs/third.md)\n", encoding="utf-8")
    assert check_links.main([str(folder)]) == 1
    told = capsys.readouterr().err
    assert "the link needs the whole address" in told
    assert "third.md: there is no such file" in told
