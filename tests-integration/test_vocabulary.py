"""One word for one thing: no name with two meanings, and no retired phrases.

`docs/reference/glossary.md` has the words. When a folder is free of retired phrases, add it to `REWORDED`, so that they
cannot return.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


# ---------------------------------------------------------------- one public definition of a name

SHARED = {
    "COMMAND": "The entry point of each command module of the group `accel.commands`.",
    "GROUP": "The group of arguments in the help of each command that has one.",
    "MANIFEST": "The entry point of each backend of the group `accel.backends`.",
    "REQUIREMENT": "The package that a module needs, beside the module that imports it.",
    "main": "The entry function of each module that runs as a program.",
    "present": "The function of each manifest that says whether its engine runs already.",
}
"""Names that several modules define because a protocol prescribes them, each with the reason."""

# The interface of the original library prescribes the names of the drop-in.
PRESCRIBED = "accelerate"


def homonyms(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The modules that define each public name with two definitions: classes, and functions of different packages.

    A name is public if `__all__` of its module has it. An import is not a definition.

    Args:
        sources: path and text of each module.
    """
    found: dict[str, list[str]] = defaultdict(list)
    classes: set[str] = set()
    for module, text in sources:
        exported: set[str] = set()
        defined: set[str] = set()
        for node in ast.parse(text).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                defined.add(node.name)
                classes |= {node.name} if isinstance(node, ast.ClassDef) else set()
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {target.id for target in targets if isinstance(target, ast.Name)}
                defined |= names
                if "__all__" in names and isinstance(node.value, (ast.Tuple, ast.List)):
                    exported = {ast.literal_eval(element) for element in node.value.elts}
        for name in exported & defined:
            found[name].append(module)
    return {
        name: modules
        for name, modules in found.items()
        if len(modules) > 1 and (name in classes or len({module.split("/")[0] for module in modules}) > 1)
    }


def modules() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        module = path.relative_to(ROOT / "packages").as_posix().split("/src/")[1]
        if not module.startswith(f"{PRESCRIBED}/"):
            yield module, path.read_text(encoding="utf-8")


def test_a_public_name_has_one_definition() -> None:
    found = homonyms(modules())
    assert {name: places for name, places in found.items() if name not in SHARED} == {}


def test_homonyms_are_found_and_imports_and_private_names_are_not() -> None:
    sources = {
        "one/first.py": '__all__ = ("Packing", "pack", "read")\nclass Packing: ...\ndef pack(): ...\ndef read(): ...',
        "one/second.py": '__all__ = ["Packing", "read"]\nPacking = int\ndef read(): ...',
        "two/third.py": '__all__ = ("pack",)\nfrom one.first import pack',
        "two/fourth.py": "class Packing: ...\ndef pack(): ...",
    }
    assert homonyms(sources.items()) == {"Packing": ["one/first.py", "one/second.py"]}
    assert set(homonyms([*sources.items(), ("three/fifth.py", '__all__ = ("pack",)\npack = None')])) == {
        "Packing",
        "pack",
    }


# ---------------------------------------------------------------- names that say nothing

EMPTY_NAMES = {"asked", "found", "given", "known", "made", "told"}
"""Names for "the result". A variable, parameter, attribute or function is named after the thing that it holds."""


def empty_names(text: str) -> list[str]:
    """Line number and name of each binding of an empty name, also with a leading underscore."""
    bound = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            name = node.name or ""
        elif isinstance(node, ast.alias):
            name = node.asname or ""
        else:
            continue
        if name.lstrip("_") in EMPTY_NAMES:
            bound.append((node.lineno, name))
    return [f"line {line}: {name}" for line, name in sorted(bound)]


@pytest.mark.parametrize("package", sorted(path.name for path in (ROOT / "packages").iterdir()))
def test_names_say_what_they_hold(package: str) -> None:
    paths = sorted(ROOT.glob(f"packages/{package}/src/**/*.py"))
    assert paths, f"there is no package {package}"
    bound = {str(path.relative_to(ROOT)): empty_names(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: names for path, names in bound.items() if names} == {}


def test_each_way_to_bind_an_empty_name_is_seen() -> None:
    text = """
def given(asked, *, told=0): ...
class _Found:
    known: int
    def of(self): self.made = [found for found in ()]
for _given, (known, _) in (): ...
with open("a") as told: ...
if (asked := 1): ...
try: ...
except OSError as made: ...
import json as found
match 1:
    case [*told]: ...
    case found: ...
told_at = given(asked=1).found
"""
    names = [line.partition(": ")[2] for line in empty_names(text)]
    expected = "given asked told known made found _given known told asked made found told found"
    assert sorted(names) == sorted(expected.split())


# ---------------------------------------------------------------- retired phrases

PHRASES: Mapping[str, tuple[str, str]] = {
    r"\b(is|are|was|were|been|be) asked for\b": ("TP was asked for.", 'say what failed: "Cannot use TP: ..."'),
    r"\b(was|were) to be\b": ("The file was to be read.", 'say what failed: "Cannot read the file."'),
    r"\b(is|are|was|were|been|be) told\b": ("Each rank is told of it.", '"receives", "reports to"'),
    r"(?<!there\s)(?<!here\s)\b(is|are) no (?!longer\b|more\b)": ("A list is no tensor.", '"is not a tensor"'),
    r"\bstands? in for\b": ("A CPU stands in for it.", '"replaces", "simulates"'),
    r"\b(come|comes|came|bring|brings) along\b": ("It comes along with torch.", '"includes", "is part of"'),
    r"\b(but|save) for (the|a|an|its|their|one|what|those)\b": ("All but for the last.", '"except"'),
    r"\blies?\b(?! to\b)": ("The folder lies in runs.", '"is in"'),
    r"\bloading process(es)?\b": ("Each loading process.", '"DataLoader worker"'),
    r"\btruth values?\b": ("A truth value.", '"bool"'),
    r"\bwhole numbers?\b": ("A whole number.", '"int", "integer"'),
    r"\b(come|comes|came) to (the same|an|its|their) end\b": ("All come to the same end.", '"finish", "agree"'),
    r"\bwhat (it|he|one) is called\b": ("It says what it is called.", '"its name"'),
    r"\bwhat (it|they) (come|comes|came) to\b": ("It shows what it comes to.", '"the result", "the settings"'),
    r"\b(as far as|where) it stands?\b": ("It says where it stands.", '"its position"'),
    r"\bnobody (goes|can go) on\b": ("Nobody goes on.", '"none continues"'),
    r"\bfor whoever\b": ("For whoever reads it.", '"for users", "for contributors"'),
    r"\bfor ever\b": ("It waits for ever.", '"forever"'),
    r"\bwhat messages call\b": ("It is what messages call the group.", '"its name in messages"'),
    r"\b(does|do) not go with\b": ("It does not go with fp16.", '"does not work with"'),
}
"""Retired phrases as patterns (a space also matches a line break), each with a planted example and what to say."""

REWORDED = (
    ".github/*.md",
    "README.md",
    "docs/*.md",
    "docs/*/*.md",
    "packages/*/README.md",
    "packages/accel-cli/src/**/*.py",
    "packages/accel-data/src/**/*.py",
    "packages/accel-ops/src/**/*.py",
    "packages/accel-plugins/src/**/*.py",
    "packages/accel-state/src/**/*.py",
    "packages/accel-torch/src/**/*.py",
    "packages/accel-bigmodel/src/**/*.py",
    "packages/accel-tracking/src/**/*.py",
    "packages/accelerate/src/**/*.py",
    "tools/*.py",
    "tools/reference/*.py",
    "tools/bench/**/*.py",
)
"""Files whose docstrings, comments, messages and prose are free of retired phrases, as patterns from the root."""

BETWEEN_WORDS = r'(?: | ?"?\n *#* *f?"?)'
"""A space, or a line break with the quotes or the comment sign around it."""

GLOSSARY = re.compile(r"^## Glossary$.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def retired_phrases(text: str) -> list[str]:
    """Line number and phrase of each retired phrase; the glossary may quote the words that it replaces."""
    text = GLOSSARY.sub(lambda section: "\n" * section[0].count("\n"), text)
    found = []
    for pattern, (_, say) in PHRASES.items():
        matches = re.finditer(pattern.replace(" ", BETWEEN_WORDS), text, re.IGNORECASE)
        found += [
            f"line {text[: m.start()].count(chr(10)) + 1}: {' '.join(m[0].split())!r}: say {say}" for m in matches
        ]
    return found


@pytest.mark.parametrize("pattern", REWORDED)
def test_no_retired_phrase_is_in_use(pattern: str) -> None:
    paths = sorted(ROOT.glob(pattern))
    assert paths, f"{pattern} matches no file"
    found = {str(path.relative_to(ROOT)): retired_phrases(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: phrases for path, phrases in found.items() if phrases} == {}


@pytest.mark.parametrize(("pattern", "planted"), [(pattern, planted) for pattern, (planted, _) in PHRASES.items()])
def test_each_retired_phrase_is_found(pattern: str, planted: str) -> None:
    assert len(retired_phrases(f"First line.\n{planted}\n")) == 1
    assert retired_phrases(f"First line.\n{planted}\n")[0].startswith("line 2: ")
    assert re.search(pattern, planted, re.IGNORECASE)


def test_phrases_are_found_across_lines_and_ordinary_words_are_not() -> None:
    assert retired_phrases('raise X(\n    "Tensor parallelism was asked "\n    f"for."\n)')
    assert retired_phrases("# Each loading\n    # process reads.")
    for plain in ("There is no folder.", "It is no longer used.", "It asked for a file.", "The number lies to nobody."):
        assert retired_phrases(plain) == []
    assert retired_phrases("## Glossary\n\nnot: loading process\n\n## Next\n") == []
    assert retired_phrases("## Glossary\n\n## Next\n\nA truth value\n") != []
