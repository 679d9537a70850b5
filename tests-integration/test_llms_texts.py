"""`llms.txt` and `llms-full.txt` of a small site that Sphinx builds with the extension of our documents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXTENSIONS = Path(__file__).parents[1] / "docs" / "extensions"


def test_both_texts_have_every_page(tmp_path: Path) -> None:
    pytest.importorskip("myst_parser", reason="builds a site")
    source, site = tmp_path / "source", tmp_path / "site"
    (source / "how-to").mkdir(parents=True)
    (source / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(EXTENSIONS)!r})\n"
        "project = 'small'\nextensions = ['myst_parser', 'llms']\n"
    )
    (source / "index.md").write_text("# Small\n\n![a](b.svg)\n\nIt is small.\n\n```{toctree}\nhow-to/grow\n```\n")
    (source / "how-to" / "grow.md").write_text("# Grow\n\n| a |\n|---|\n\nHow it\ngrows.\n\nMore text.\n")
    (source / "b.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", str(source), str(site)], check=True, timeout=280)
    assert (site / "llms.txt").read_text().splitlines() == [
        "# small",
        "",
        "> It is small.",
        "",
        "## Pages",
        "",
        "- [Small](index.html): It is small.",
        "- [Grow](how-to/grow.html): How it grows.",
    ]
    whole = (site / "llms-full.txt").read_text()
    assert whole.index("# Small") < whole.index("# Grow") < whole.index("More text.")
