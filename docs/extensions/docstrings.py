"""Hooks of autodoc: docstrings are plain text with code between backticks, and names link to where they are shown."""

from __future__ import annotations

import ast
import enum
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from reference.api import all_links, published_in
from reference.published import LIBRARY, Entry, Links, read_library

CODE = re.compile(r"(`[^`]+`)")
SPECIAL = re.compile(r"(\\|\*|\||(?<=\w)_(?!\w))")
LIST = re.compile(r"^(?! *- )(.*\S)\n( *(?:- |1\. ))", re.MULTILINE)
SECTION = re.compile(r"(Args|Attributes|Example|Raises|Returns|Yields):$")


class Hooks:
    """What the hooks know of the packages, which `read` imports."""

    _links: Links
    _values: dict[str, Entry]

    def read(self, app: Sphinx, config: Config) -> None:
        """Imports the packages, so that autodoc finds every module loaded, with mocks of engines that are missing."""
        modules = read_library(config.interface_packages)
        self._links = all_links(modules)
        published = (entry for found in published_in(modules).values() for entry in found)
        self._values = {entry.address: entry for entry in published if entry.kind == "data"}

    def write_prose(self, app: Sphinx, kind: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
        """Makes reStructuredText of a docstring, before napoleon reads its sections."""
        if name in self._values:
            lines[:] = documentation_of(self._values[name])
        parts = (part for block in blocks(lines) for part in (*self._restructured(*block), ""))
        lines[:] = [line for part in parts for line in part.split("\n")]

    def _restructured(self, section: str, block: list[str]) -> Iterator[str]:
        """A paragraph of a section, or of the text before all sections, which has the name ""."""
        if SECTION.match(block[0]):
            yield block.pop(0)
        margin = " " * 4 if section else ""
        text = dedent("\n".join(block))
        if ">>>" in text:
            yield from block
        elif (section == "Example" and is_python(text)) or (not section and block[0].startswith(" ")):
            yield from (f"{margin}::", "", indent(text, f"{margin}    "))
        else:
            yield LIST.sub(r"\1\n\n\2", self._inline("\n".join(block)))

    def _inline(self, text: str) -> str:
        parts = CODE.split(text)
        made = []
        for number, part in enumerate(parts):
            if number % 2 == 0:
                made.append(SPECIAL.sub(r"\\\1", part))
                continue
            word = " ".join(part[1:-1].split())
            address = self._links.address(word)
            before = parts[number - 1][-1:]
            after = parts[number + 1][:1]
            shown = f"``{word}``" if address is None else f":py:obj:`{word} <{address}>`"
            made.append(("\\ " if before.isalnum() else "") + shown + ("\\ " if after.isalnum() else ""))
        return "".join(made)

    def find_name(self, app: Sphinx, env: BuildEnvironment, node: Any, shown: nodes.Element) -> nodes.Element | None:
        """Leads a name that annotations write short, or with the address of its definition, to where it is shown."""
        address = self._links.address(node.get("reftarget", "")) if node.get("refdomain") == "py" else None
        if address is None or address == node["reftarget"]:
            return None
        domain = env.domains.python_domain
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", address, node, shown)


def blocks(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The paragraphs of a docstring, each with the section that it belongs to."""
    section = ""
    for between, group in groupby(lines, key=lambda line: not line.strip()):
        if not between:
            block = list(group)
            head = SECTION.match(block[0])
            section = head[1] if head else section if block[0].startswith(" ") else ""
            yield section, block


def is_python(text: str) -> bool:
    """Whether a paragraph is code and not prose."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def documentation_of(entry: Entry) -> list[str]:
    """The text below the assignment of a value."""
    module, _, name = entry.home.rpartition(".")
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.analyze()
    return list(analyzer.attr_docs.get(("", name), ()))


def hide_signature(app: Sphinx, kind: str, name: str, item: Any, *rest: Any) -> tuple[str, str] | None:
    """Leaves out what an enumeration takes, which nobody makes by calling it."""
    return ("", "") if isinstance(item, type) and issubclass(item, enum.Enum) else None


def name_bases(app: Sphinx, name: str, item: Any, options: Any, bases: list[Any]) -> None:
    """Leaves out the base of all classes, and those whose members are shown as the class's own."""
    package = name.partition(".")[0]
    bases[:] = [base for base in bases if str(base.__module__).partition(".")[0] != package and base is not object]


def skip_fields(app: Sphinx, kind: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out what the fields of a named tuple say of themselves."""
    return True if (getattr(member, "__doc__", None) or "").startswith("Alias for field number") else None


def keep_out_of_contents(app: Sphinx, domain: str, kind: str, content: addnodes.desc_content) -> None:
    """Keeps the names of modules out of the contents of their page, which every page of the site would copy."""
    if app.env.docname.endswith(".modules") and content.parent is not None:
        content.parent["no-contents-entry"] = True


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the hooks."""
    hooks = Hooks()
    app.add_config_value("interface_packages", list(LIBRARY), "env")
    app.connect("config-inited", hooks.read)
    app.connect("autodoc-process-docstring", hooks.write_prose, priority=400)
    app.connect("autodoc-process-signature", hide_signature)
    app.connect("autodoc-process-bases", name_bases)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("missing-reference", hooks.find_name)
    app.connect("object-description-transform", keep_out_of_contents)
    return {"parallel_read_safe": True}
