"""The document of axes holds the table that runs are checked against."""

from __future__ import annotations

from pathlib import Path

from accel_plugins import mesh
from accel_plugins.ddp.manifest import MANIFEST as DDP
from accel_plugins.fsdp.manifest import FSDP1, FSDP2

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "reference" / "axes.md"


def test_the_document_holds_the_table() -> None:
    assert DOCUMENT.read_text(encoding="utf-8").endswith(mesh.as_markdown((DDP, FSDP1, FSDP2)))
