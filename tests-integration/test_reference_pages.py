"""The pages of the reference hold what the packages have, and say what their docstrings say."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import write_reference
from accel_cli.command import installed_commands
from accel_cli.launch.launchers import launch_classes
from accel_state.settings.schema import settings_of
from accelerate.names import NAMES, owners
from reference.api import all_links, api_pages, published_in
from reference.commands import commands_page
from reference.docstrings import unknown_arguments
from reference.dropin import dropin_page
from reference.errors import error_pages
from reference.markdown import code, prose, table
from reference.published import LIBRARY, Entry, Links, Modules, read_library
from reference.raised import sites
from reference.settings_page import classes_with_settings, settings_page

DOCS = Path(__file__).resolve().parents[1] / "docs"

LAZY = '''"""A made-up package."""
from accel_state.lazy import lazy_stub
__getattr__, __dir__ = lazy_stub(__name__, __file__)
'''
STUB = "from made_up.below import shown as shown\n"
BELOW = '''"""What stands below."""
from __future__ import annotations
from enum import Enum
from typing import NamedTuple
__all__ = ("LIMIT", "Colour", "Pair", "Thing", "shown")

LIMIT = "it's 5"
"""How many a `Thing` holds."""

class Colour(Enum):
    """A colour."""
    RED = "r"

class Pair(NamedTuple):
    """Two.

    Args:
        left: the first.
    """
    left: int

class Part:
    def inherited(self) -> None:
        """Comes from a base."""

class Thing(Part):
    """A *thing*, of the_ |kind| `<id>`s as <id>:
    - one `a|b`
    - two

    Args:
        size: how large; see `LIMIT` and `Thing`.
        **others: more.

    Raises:
        ValueError: it is too large.
    """

    def __init__(self, size: int, /, *, colour: Colour = Colour.RED, **others: Thing) -> None: ...

    def grow(self, by: float = 1.5) -> Thing:
        """Make it larger; `shown` is an argument elsewhere.

        Example:
            >>> Thing(1).grow()  # doctest: +SKIP
        """
        return self

    def silent(self) -> None: ...

def shown(thing: Thing, *rest: Thing) -> bool:
    """Whether a `Thing` is shown."""
    return hidden(thing)

def hidden(thing):
    return True
'''


@pytest.fixture(scope="module")
def modules() -> Modules:
    """Every module of our packages."""
    return read_library()


@pytest.fixture(scope="module")
def published(modules: Modules) -> dict[str, list[Entry]]:
    """What our packages publish."""
    return published_in(modules)


@pytest.fixture(scope="module")
def links(modules: Modules) -> Links:
    """Where names of our packages lead."""
    return all_links(modules)


@pytest.fixture(scope="module")
def page_of_settings(modules: Modules, links: Links) -> str:
    """The page of settings."""
    return settings_page(modules, links)


SITE = """
import sys
from pathlib import Path
sys.path[:0] = [{source!r}, {tools!r}]
import write_reference
from reference.api import all_links, api_pages
from reference.published import read_library
from sphinx.cmd.build import main
modules = read_library(["made_up"])
write_reference.write(Path("pages"), api_pages(modules, all_links(modules)))
Path("pages/index.md").write_text("# All\\n\\n```{{toctree}}\\n:glob:\\napi/*\\n```\\n", encoding="utf-8")
ours = ["-W", "-c", {docs!r}, "-D", "interface_packages=made_up"]
sys.exit(main(["-q", *ours, "-b", "html", "pages", "site"]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The site of a made-up package, as Sphinx makes it with our settings: page to its text with links."""
    folder = tmp_path_factory.mktemp("made-up")
    package = folder / "src" / "made_up"
    package.mkdir(parents=True)
    for name, text in {"__init__.py": LAZY, "__init__.pyi": STUB, "below.py": BELOW}.items():
        (package / name).write_text(text, encoding="utf-8")
    tools = str(Path(write_reference.__file__).parent)
    program = SITE.format(source=str(package.parent), tools=tools, docs=str(DOCS))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in (folder / "site/api").glob("*.html")}
    return {name: linked(text) for name, text in pages.items()}


def linked(html: str) -> str:
    """The text of a page, in which links are written `text <#target>`."""
    text = re.sub(r'<a class="headerlink.*?</a>', "", html)
    text = re.sub(r'<a class="reference internal" href="([^"]*#[^"]*)"[^>]*>(.*?)</a>', r"\2 &lt;\1&gt;", text)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", "", text)))


# ---------------------------------------------------------------- a made-up package
def test_a_lazy_name_is_documented_where_users_import_it_from(site: dict[str, str]) -> None:
    page = site["made_up.html"]
    thing = "Thing <made_up.modules.html#made_up.below.Thing>"
    assert f"shown(thing: {thing}, *rest: {thing})" in page
    assert f"Whether a {thing} is shown." in page
    assert "hidden" not in page


def test_names_of_modules_have_a_page_of_their_own(site: dict[str, str]) -> None:
    page = site["made_up.modules.html"]
    assert "Thing(size: int, /, *, colour: Colour <#made_up.below.Colour> = Colour.RED, **others: Thing" in page
    assert 'made_up.below.LIMIT = "it\'s 5" How many a Thing <#made_up.below.Thing> holds.' in page
    assert "A *thing*, of the_ |kind| <id>s as <id>: one a|b two" in page
    assert "size – how large; see LIMIT and Thing <#made_up.below.Thing>." in page
    assert "**others – more." in page
    assert "ValueError – it is too large." in page
    assert "grow(by: float = 1.5) → Thing <#made_up.below.Thing> Make it larger; shown is an argument" in page
    assert "Example >>> Thing(1).grow() " in page
    assert "Comes from a base." in page
    assert "RED = 'r'" in page
    assert "left – the first." in page
    for absent in ("silent", "Alias for field", "Bases: object", "Part"):
        assert absent not in page


# ---------------------------------------------------------------- ours
def takers(entry: Entry) -> list[tuple[str, Any]]:
    """A published class with its methods, or a function; nothing of what is only a value."""
    methods = vars(entry.item).items() if entry.kind in ("class", "exception") else ()
    own = [] if entry.kind == "data" else [(entry.home, entry.item)]
    return own + [(f"{entry.home}.{name}", member) for name, member in methods if inspect.isfunction(member)]


@pytest.mark.parametrize("name", LIBRARY)
def test_every_published_class_and_function_says_what_it_is_for(name: str, published: dict[str, list[Entry]]) -> None:
    silent = [entry.home for entry in published[name] if entry.kind != "data" and not entry.item.__doc__]
    assert silent == []


@pytest.mark.parametrize("name", LIBRARY)
def test_docstrings_describe_arguments_that_exist(name: str, published: dict[str, list[Entry]]) -> None:
    described = (pair for entry in published[name] for pair in takers(entry))
    wrong = {path: unknown for path, item in described if (unknown := unknown_arguments(item))}
    assert wrong == {}


def test_every_name_at_the_top_of_a_package_is_documented(modules: Modules, links: Links) -> None:
    objects = {id(entry.item) for found in published_in(modules).values() for entry in found}
    homeless = [
        f"{name}.{export}"
        for name in LIBRARY
        for export in getattr(modules[name], "__all__", ())
        if name != "accelerate" and f"{name}.{export}" not in links.targets
        if id(getattr(modules[name], export)) not in objects
    ]
    assert homeless == []


def test_every_published_name_is_on_one_page_once(
    modules: Modules, links: Links, published: dict[str, list[Entry]]
) -> None:
    pages = "\n".join(api_pages(modules, links).values())
    shown = re.findall(r"^\.\. auto(?:class|exception|function|data):: (\S+)$", pages, re.MULTILINE)
    assert len(shown) > 2000
    assert sorted(shown) == sorted(entry.address for found in published.values() for entry in found)
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
        "| `--mixed_precision`, `ACCELERATE_MIXED_PRECISION`, key `mixed_precision`, `Accelerator(mixed_precision=)` |",
        # Its definition leaves it open, and its class fills it in.
        "| `fsdp_version` | Version of FSDP. | an integer of at least 1 | `1` | `--fsdp_version`, "
        "`FSDP_VERSION`, key `fsdp_config.fsdp_version`, `FullyShardedDataParallelPlugin(fsdp_version=)` |",
        # What only a script can give.
        "| `find_unused_parameters` | search for parameters that a forward did not use; needed if there are any. "
        "| `bool` | `False` |",
    ],
)
def test_a_row_says_everything_about_a_setting(row: str, page_of_settings: str) -> None:
    assert row in page_of_settings.splitlines()


def test_variables_are_not_taken_for_defaults(
    monkeypatch: pytest.MonkeyPatch, modules: Modules, links: Links, page_of_settings: str
) -> None:
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert settings_page(modules, links) == page_of_settings


def test_every_command_is_on_the_page_with_its_options() -> None:
    page = commands_page()
    assert re.findall(r"^## accel (\S+)$", page, re.MULTILINE) == list(installed_commands())
    for line in (
        "| `--num_processes N` | Total number of processes; by default one for each device. |",
        "| `--config_file PATH` | Config file; by default the one that `accel config` writes. |",
        "| `--dry_run` | Print what prune would remove, and remove nothing. |",
        "| `--timeout N` | Seconds to wait for the other machines (default: 60). |",
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


def test_every_class_of_errors_is_in_the_catalogue(modules: Modules, links: Links) -> None:
    pages = error_pages(modules, links)
    published = [name for name in modules["accel_state.errors"].__all__ if name not in ("AccelError", "BadStep")]
    for name in (*published, "CannotPickle", "UnknownName"):
        assert f"| [{name}]({name}.md) |" in pages["errors/index.md"]
    assert {name for name in published if "## Messages" not in pages[f"errors/{name}.md"]} == set()
    assert "ProcessesFailed" in pages["errors/index.md"].partition("## Outside of this tree")[2]
    row = "| `accel_state.plugins` `PluginGroup.unknown` | ‹failure› | Installed ‹self.plural›: ‹', '.join(valid)"
    assert row in pages["errors/SettingError.md"]


# ---------------------------------------------------------------- all of it
def test_the_pages_refer_to_each_other(tmp_path: Path) -> None:
    (tmp_path / "old.md").write_text("# Of a page that is no more\n", encoding="utf-8")
    assert write_reference.main([str(tmp_path)]) == 0
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.md")}
    assert "old.md" not in pages
    assert {"settings.md", "commands.md", "dropin.md", "errors/Conflict.md", "api/accel_torch.md"} <= set(pages)
    assert re.search(r"It also gives every name at the top of .*\[`accel_state`\]", pages["api/accel_torch.md"])
    assert ".. autoclass:: accel_torch.Accelerator" in pages["api/accel_torch.md"]
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
