"""The store of folders passes the kit for stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_plugins.checkpoint.store import FileStore
from accel_testing.stores import StoreSuite


class TestFileStore(StoreSuite):
    """A folder of this machine."""

    store_class = FileStore

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return (tmp_path / "store").as_uri()
