"""The result of a check of parity, and the exit codes of the commands."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from accel_check.comparison import ParityFinding

__all__ = ("CODES", "EXIT_CODES", "ParityReport")

CODES: Final = {"equal": 0, "differs": 1, "not verified": 3}
"""Exit codes by verdict."""
EXIT_CODES: Final = "Exit code 0: equal; 1: differs; 3: not verified."


@dataclass
class ParityReport:
    """The result of a check.

    Args:
        verdict: "equal", "differs" or "not verified".
        reason: one sentence.
        findings: the differences of the first step with any, causes before consequences.
        steps: the number of steps compared.
        precision: the width of floating-point numbers by default in both runs, "float64" or "float32".
        remarks: further observations, which apply to one process as well or cannot be decided.
        written: files that the script wrote outside of the scratch folder.
    """

    verdict: str
    reason: str
    findings: list[ParityFinding] = field(default_factory=list)
    steps: int = 0
    precision: str = ""
    remarks: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code of the command."""
        return CODES[self.verdict]

    @property
    def parameter(self) -> str:
        """The first parameter or buffer that differs; empty if unknown."""
        return next((finding.parameter for finding in self.findings if finding.parameter), "")

    @property
    def module(self) -> str:
        """The first module that differs; empty if unknown."""
        return next((finding.module for finding in self.findings if finding.module), "")

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.reason}"]
        lines += [f"  {finding}" for finding in self.findings]
        lines += [f"  also: {remark}" for remark in self.remarks]
        if self.precision:
            lines.append(f"  compared in {self.precision}, with dropout turned off")
        lines += [f"  the script wrote {path}" for path in self.written]
        return "\n".join(lines)

    def as_json(self) -> str:
        """The report as one line of JSON."""
        return json.dumps({**asdict(self), "parameter": self.parameter, "module": self.module})
