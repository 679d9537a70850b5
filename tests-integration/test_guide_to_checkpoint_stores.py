"""The store of the guide passes the kit for stores."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accel_plugins.checkpoint.store import CheckpointStore
from accel_testing.stores import StoreSuite

GUIDE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "write-a-checkpoint-store.md"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, float], CheckpointStore]]:
    """The class of the guide, in a package with its entry point."""
    text = GUIDE.read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?class MemoryStore.*?)```", text, re.DOTALL)
    (entry_points,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    site = tmp_path_factory.mktemp("site")
    (site / "accel_memory_store.py").write_text(block.partition("store = MemoryStore")[0], encoding="utf-8")
    information = site / "accel_memory_store-0.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: accel-memory-store\nVersion: 0.1\n")
    named = entry_points.replace('[project.entry-points."accel.checkpoint_stores"]', "[accel.checkpoint_stores]")
    (information / "entry_points.txt").write_text(named.replace('"', ""))
    sys.path.insert(0, str(site))
    yield importlib.import_module("accel_memory_store").MemoryStore
    sys.path.remove(str(site))


class TestMemoryStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def _of_the_guide(self, installed: Callable[[str, float], CheckpointStore]) -> None:
        type(self).store_class = staticmethod(installed)  # type: ignore[assignment]

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"memory://{tmp_path}/run"
