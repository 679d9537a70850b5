"""How Sphinx makes the site of these documents. `nox -s docs` runs it, offline and with warnings as errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tomli
from sphinx.application import Sphinx

project = "accel"
project_copyright = "the accel contributors"
pygments_style = "friendly"
sys.path.insert(0, str(Path(__file__).parent / "extensions"))
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "bars",
    "docstrings",
    "first_results",
    "llms",
    "navigation",
]
exclude_patterns = ["examples", "extensions"]
templates_path = ["templates"]

# A link may name a heading, as it may where the repository is read.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

# The interface, from docstrings; what only signatures import for type checkers stays as it is written.
default_role = "code"
autodoc_default_options = {
    "member-order": "bysource",
    "special-members": "__call__, __enter__",
}
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 100

# The copy button leaves out prompts, and what a command printed.
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"

PROJECT = tomli.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = PROJECT["tool"]["accel"]["repository"]
VERSION = tomli.loads((Path(__file__).parents[1] / "packages/accel-torch/pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]["version"]

version = release = VERSION

html_theme = "furo"
html_title = f"accel {VERSION}"
html_logo = "_static/logo.svg"
html_theme_options = {
    "source_view_link": f"{REPOSITORY}/blob/main/docs/{{filename}}",
    "source_edit_link": f"{REPOSITORY}/edit/main/docs/{{filename}}",
}
# The theme's own parts, and below the search the version with its changes.
SIDEBAR = ("brand", "search", "version", "scroll-start", "navigation", "scroll-end")
html_sidebars = {"**": [f"sidebar/{part}.html" for part in SIDEBAR]}
html_context = {"repository": REPOSITORY}
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = ["tables.js"]
html_favicon = "_static/favicon.svg"
# Both list every name a second time; the search finds names, and the reference lists them by package.
html_use_index = False
html_domain_indices = False
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")

# A document outside of this folder is not a page; tools/check_links.py checks that it exists.
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:\.github|packages|tests-integration)/[^)#]*\.md)(?:#[^)]*)?\)")


def name_documents_outside(app: Sphinx, name: str, source: list[str]) -> None:
    """Gives the place in the repository where a link leads to a document that is not a page."""
    source[0] = OUTSIDE.sub(r"\1 (`\2`)", source[0])


GROUP = re.compile(r"^## (.+)$", re.MULTILINE)


def chart_of_group(heading: re.Match[str]) -> str:
    """A heading, and the directive of the chart of its group."""
    return f"{heading[0]}\n\n```{{bars}} {heading[1].lower().replace(' ', '_')}\n```"


def draw_benchmarks(app: Sphinx, name: str, source: list[str]) -> None:
    """Puts a chart under the heading of each group; the file itself stays readable where no site is built."""
    if name == "reports/benchmarks":
        source[0] = GROUP.sub(chart_of_group, source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", name_documents_outside)
    app.connect("source-read", draw_benchmarks)
