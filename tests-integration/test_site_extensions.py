"""A small site that Sphinx builds with extensions of our documents: folded navigation, and what the search shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXTENSIONS = Path(__file__).parents[1] / "docs" / "extensions"
PAGES = {
    "conf.py": f"""
import sys
sys.path.insert(0, {str(EXTENSIONS)!r})
project, html_theme, extensions = "small", "furo", ["myst_parser", "navigation", "first_results"]
myst_heading_anchors = 4
""",
    "index.md": """# Small

```{toctree}
:caption: Start
grow
```

```{toctree}
:caption: Reference
reference/error-index
reference/generated/settings
```
""",
    "grow.md": "# Grow\n\nIt grows.\n",
    "reference/error-index.md": "# Messages\n\n## Launching\n\n### Cannot launch …. It is late.\nWait.\n",
    "reference/generated/settings.md": """# Settings

## Run

| setting | meaning | type | default | set by |
|---|---|---|---|---|
| `pace` | How fast. | an integer | `1` | `--pace`, `ACCEL_PACE` |

## Other

| setting | meaning | type | default | set by |
|---|---|---|---|---|
| `pace` | Of others. | an integer | `1` | – |
""",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("furo", reason="builds a site")
    folder = tmp_path_factory.mktemp("small")
    for name, text in PAGES.items():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(folder / "source"), str(folder / "site")]
    subprocess.run(command, check=True, timeout=280)
    return folder / "site"


@pytest.mark.parametrize(
    ("page", "opened"),
    [("index.html", "Start"), ("grow.html", "Start"), ("reference/error-index.html", "Reference")],
)
def test_only_the_group_of_the_page_is_open(site: Path, page: str, opened: str) -> None:
    text = (site / page).read_text(encoding="utf-8")
    groups = re.findall(r'<details( open="")?><summary class="caption">(\w+)</summary>\s*<ul', text)
    assert [name for _, name in groups] == ["Start", "Reference"]
    assert [name for is_open, name in groups if is_open] == [opened]


def test_the_search_knows_messages_and_settings_with_their_addresses(site: Path) -> None:
    text = (site / "_static" / "first-results.js").read_text(encoding="utf-8")
    found = json.loads(text.removeprefix("const FIRST_RESULTS = ").rstrip().rstrip(";"))
    assert [(one["kind"], one["text"], one.get("names")) for one in found] == [
        ("message", "Cannot launch …. It is late.", None),
        ("setting", "pace", ["pace", "--pace", "ACCEL_PACE"]),
        ("setting", "pace", ["pace"]),
    ]
    assert [one.get("about") for one in found] == [None, "Run: How fast.", "Other: Of others."]
    for one in found:
        page, anchor = one["address"].split("#")
        assert f'id="{anchor}"' in (site / page).read_text(encoding="utf-8")


def test_only_the_page_of_the_search_reads_the_list(site: Path) -> None:
    pages = [page.name for page in sorted(site.rglob("*.html")) if "first-results.js" in page.read_text("utf-8")]
    assert pages == ["search.html"]
