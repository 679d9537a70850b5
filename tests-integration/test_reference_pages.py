"""The pages of the reference hold what the packages have, and say what their docstrings say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import griffe
import pytest

import write_reference
from accel_cli.command import offers
from accel_cli.launch.options import launch_classes
from accel_state.settings.schema import settings_of
from accelerate.names import NAMES, owners
from reference.api import api_pages, links_to, published_in
from reference.commands import commands_page
from reference.described import unknown_arguments
from reference.dropin import dropin_page
from reference.errors import error_pages
from reference.links import Links
from reference.markdown import code, directive, prose, table
from reference.published import LIBRARY, Entry, Library, read_library
from reference.raised import sites
from reference.settings_page import classes_with_settings, settings_page

TOP = '''"""A made-up package."""
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from made_up.below import shown as shown
__all__ = ("shown",)
'''
BELOW = '''"""What stands below."""
from __future__ import annotations
__all__ = ("LIMIT", "Thing", "shown")

LIMIT = "it's 5"
"""How many."""

class Part:
    def inherited(self) -> None:
        """Comes from a base."""

class Thing(Part):
    """A *thing*, written to `<id>` as <id>.

    Args:
        size: how large; see `LIMIT` and `Thing`.

    Raises:
        ValueError: it is too large.
    """

    def __init__(self, size: int, /, *, others: tuple[Thing, ...] = ()) -> None: ...

    def grow(self, by: float = 1.5) -> Thing:
        """Make it larger.

        Example:
            >>> Thing(1).grow()  # doctest: +SKIP
        """
        return self

def shown(thing: Thing, *rest: Thing) -> bool:
    """Whether a `Thing` is shown."""
    return hidden(thing)

def hidden(thing):
    return True
'''


@pytest.fixture(scope="module")
def library() -> Library:
    """Our packages, as they are."""
    return read_library()


@pytest.fixture(scope="module")
def links(library: Library) -> Links:
    """Where names of our packages lead."""
    return links_to(entry for found in published_in(library).values() for entry in found)


@pytest.fixture(scope="module")
def page_of_settings(library: Library, links: Links) -> str:
    """The page of settings."""
    return settings_page(library, links)


@pytest.fixture
def made_up(tmp_path: Path) -> dict[str, str]:
    """The pages of a made-up package."""
    source = tmp_path / "packages" / "made-up" / "src" / "made_up"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text(TOP, encoding="utf-8")
    (source / "below.py").write_text(BELOW, encoding="utf-8")
    library = read_library(tmp_path, ("made_up",))
    return api_pages(library, links_to(entry for found in published_in(library).values() for entry in found))


def functions_of(entry: Entry) -> list[griffe.Class | griffe.Function]:
    """A published class with its methods, or a function; nothing of what is only a value."""
    if isinstance(entry.item, griffe.Class):
        return [entry.item, *(member for member in entry.item.members.values() if isinstance(member, griffe.Function))]
    return [entry.item] if isinstance(entry.item, griffe.Function) else []


# ---------------------------------------------------------------- a made-up package
def test_a_name_at_the_top_is_shown_under_the_address_users_import_it_from(made_up: dict[str, str]) -> None:
    page = made_up["api/made_up.md"]
    assert "{py:function} shown(thing: made_up.below.Thing, *rest: made_up.below.Thing) -> bool" in page
    assert ":module: made_up\n:canonical: made_up.below.shown" in page
    assert "Whether a {py:obj}`Thing <made_up.below.Thing>` is shown." in page
    assert "hidden" not in page


def test_names_of_modules_have_a_page_of_their_own(made_up: dict[str, str]) -> None:
    page = made_up["api/made_up.modules.md"]
    assert "{py:class} Thing(size: int, /, *, others: tuple[made_up.below.Thing, ...] = ())" in page
    assert ":value: '''it''s 5'''" in page or ":value: '\"it''s 5\"'" in page
    assert r"A \*thing\*, written to `<id>` as \<id>." in page
    assert "- `size`: how large; see `LIMIT` and {py:obj}`Thing <made_up.below.Thing>`." in page
    assert "- `ValueError`: it is too large." in page
    assert "{py:method} grow(by: float = 1.5) -> made_up.below.Thing" in page
    assert "```pycon\n>>> Thing(1).grow()\n```" in page
    assert "Comes from a base." in page


# ---------------------------------------------------------------- ours
@pytest.mark.parametrize("name", LIBRARY)
def test_every_published_class_and_function_says_what_it_is_for(name: str, library: Library) -> None:
    silent = [
        entry.home for entry in published_in(library)[name] if functions_of(entry) and not entry.item.has_docstring
    ]
    assert silent == []


@pytest.mark.parametrize("name", LIBRARY)
def test_docstrings_describe_arguments_that_exist(name: str, library: Library) -> None:
    described = (item for entry in published_in(library)[name] for item in functions_of(entry))
    wrong = {item.path: unknown for item in described if (unknown := unknown_arguments(item))}
    assert wrong == {}


def places(package: griffe.Module, name: str) -> set[str]:
    """Where a name of a package may be shown: at its top, or where a package below defines it."""
    member = package.members.get(name)
    return {f"{package.path}.{name}"} | ({member.target_path} if isinstance(member, griffe.Alias) else set())


def test_every_name_at_the_top_of_a_package_has_its_place(library: Library, links: Links) -> None:
    homeless = [
        f"{name}.{export}"
        for name in LIBRARY
        if name != "accelerate"
        for export in map(str, library[name].exports or ())
        if not any(place in links.targets for package in LIBRARY for place in places(library[package], export))
    ]
    assert homeless == []


def test_no_address_is_shown_twice(library: Library, links: Links) -> None:
    pages = "\n".join(api_pages(library, links).values())
    shown = re.findall(r"^`+\{py:(?:class|exception|function|data)\} (\w+).*\n:module: (\S+)", pages, re.MULTILINE)
    assert len(shown) > 1000
    assert len(shown) == len(set(shown))


def test_every_setting_is_on_the_page(page_of_settings: str) -> None:
    classes = classes_with_settings()
    assert set(launch_classes()) <= set(classes)
    for cls in classes:
        section = page_of_settings.partition(f"\n## {cls.__qualname__}\n")[2].partition("\n## ")[0]
        for name, known in settings_of(cls).items():
            (row,) = (line for line in section.splitlines() if line.startswith(f"| `{name}` |"))
            for text in (known.flag, *known.variables, known.key):
                assert text is None or f"`{text}`" in row


@pytest.mark.parametrize(
    "row",
    [
        "| `mixed_precision` | Mixed precision of the forward pass. | `no`, `fp16`, `bf16`, `fp8` | `no` "
        "| `--mixed_precision` | `ACCELERATE_MIXED_PRECISION` | `mixed_precision` | `Accelerator(mixed_precision=)` |",
        # Its definition leaves it open, and its class fills it in.
        "| `fsdp_version` | Version of FSDP. | an integer of at least 1 | `1` | `--fsdp_version` | `FSDP_VERSION` "
        "| `fsdp_config.fsdp_version` | `FullyShardedDataParallelPlugin(fsdp_version=)` |",
        # What only a script can give.
        "| `find_unused_parameters` | look for parameters that took no part in a forward; needed when there are any. "
        "| `bool` | `False` |",
    ],
)
def test_a_row_says_everything_about_a_setting(row: str, page_of_settings: str) -> None:
    assert row in page_of_settings.splitlines()


def test_variables_are_not_taken_for_defaults(
    monkeypatch: pytest.MonkeyPatch, library: Library, links: Links, page_of_settings: str
) -> None:
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert settings_page(library, links) == page_of_settings


def test_every_command_is_on_the_page_with_its_options() -> None:
    page = commands_page()
    assert re.findall(r"^## accel (\S+)$", page, re.MULTILINE) == list(offers())
    for line in (
        "| `--num_processes N` | Processes over all machines; one for each device when not given. |",
        "| `--config_file PATH` | The file; the user's own when not given. |",
        "| `--dry_run` | Only tell what would go (prune). |",
        "| `--timeout N` | Seconds to wait for them. Default: `60.0`. |",
        "### accel runs show",
    ):
        assert line in page.splitlines()


def test_every_old_address_is_on_the_page(links: Links) -> None:
    page = dropin_page(links)
    for address in NAMES:
        section = page.partition(f"\n## {address}\n")[2].partition("\n## ")[0]
        assert re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE) == sorted(owners(address))
    assert "| `gather` | {py:obj}`accel_ops.gather` |" in page
    assert "`accelerate.test_utils`" in page


# ---------------------------------------------------------------- errors
RAISING = """
REMEDY = "Give another."

def check(name: str, known: bool) -> None:
    asked = f"{name!r} was asked for."
    if known:
        raise Wrong(asked, "It is taken." if name else "It is empty.", REMEDY)
    raise errors.Wrong(asked, obstacle=explain(name) + " Sorry.", remedy=REMEDY)

class Other:
    def method(self) -> None:
        raise ValueError("not ours")
"""


def test_messages_are_read_where_errors_are_made(tmp_path: Path) -> None:
    source = tmp_path / "packages" / "made-up" / "src" / "made_up"
    source.mkdir(parents=True)
    (source / "raising.py").write_text(RAISING, encoding="utf-8")
    first, second = sites(frozenset({"Wrong"}), tmp_path)
    assert (first.module, first.function) == ("made_up.raising", "check")
    assert first.parts == ("‹name› was asked for.", "It is taken. / It is empty.", "Give another.")
    assert second.parts == ("‹name› was asked for.", "‹explain(name)› Sorry.", "Give another.")


def test_every_class_of_errors_is_in_the_catalogue(library: Library, links: Links) -> None:
    pages = error_pages(library, links)
    published = [name for name in map(str, library["accel_state"]["errors"].exports or ()) if name != "AccelError"]
    for name in (*published, "CannotPickle", "ReplicasDiffer", "UnknownName"):
        assert f"| [{name}]({name}.md) |" in pages["errors/index.md"]
    assert {name for name in published if "## Messages" not in pages[f"errors/{name}.md"]} == set()
    assert "ProcessesFailed" in pages["errors/index.md"].partition("## Outside of this tree")[2]
    row = "| `accel_cli.command` `_unknown` | Cannot run `accel ‹name›`. | There is no such command. |"
    assert row in pages["errors/SettingError.md"]


# ---------------------------------------------------------------- all of it
def test_the_pages_are_made_without_torch_and_refer_to_each_other(tmp_path: Path) -> None:
    program = (
        "import sys; import write_reference as tool; code = tool.main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    (tmp_path / "old.md").write_text("# Of a page that is no more\n", encoding="utf-8")
    tools = Path(write_reference.__file__).parent
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=tools, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.md")}
    assert "old.md" not in pages
    assert {"settings.md", "commands.md", "dropin.md", "errors/Conflict.md", "api/accel_torch.md"} <= set(pages)
    assert "It also gives every name that is shown at the top of [`accel_state`]" in pages["api/accel_torch.md"]
    assert "{py:method} prepare(" in pages["api/accel_torch.md"]
    for name, page in pages.items():
        for target in re.findall(r"\]\(([\w./-]+\.md)\)", page):
            assert (tmp_path / name).parent.joinpath(target).exists(), f"{name} leads to {target}"


# ---------------------------------------------------------------- markdown
@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("a <b> and *c*\nd_e", r"a \<b> and \*c\* d\_e"),
        ("see `<b> *c*` or\n\n- one\n  more\n- two", "see `<b> *c*` or\n\n- one more\n- two"),
        ("at https://example.org/a_b. Then", "at <https://example.org/a_b>. Then"),
        ("", ""),
    ],
)
def test_plain_text_becomes_markdown(text: str, markdown: str) -> None:
    assert prose(text) == markdown


def test_code_and_cells_keep_what_they_hold() -> None:
    assert code("a`b") == "`` a`b ``"
    assert table(("name",), [["`int | None`\nmore"]])[-1] == r"| `int \| None` more |"


def test_a_directive_closes_around_those_in_it() -> None:
    inner = directive("py:method", "b()", [], ["text"], depth=0)
    lines = directive("py:class", "A", [("value", "'x'")], inner, depth=1)
    assert lines[0] == "`````{py:class} A"
    assert ":value: '''x'''" in lines
    assert [line for line in lines if line.startswith("````")] == [
        "`````{py:class} A",
        "````{py:method} b()",
        "````",
        "`````",
    ]
