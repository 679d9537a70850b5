"""What is collected here."""

from __future__ import annotations

# A package of its own, which is tested where it is installed.
collect_ignore = ["accel-backend-example"]
