"""The drop-in has the names and parameters of the original that `reference/api.json` has, except its test tools.

`reference/left_out.json` lists further names that it leaves out: menus, questions, parsers and constants that only the
original's own commands use, and functions that are steps of its own larger ones.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from accelerate.names import NAMES, owner_of

REFERENCE = Path(__file__).parent / "reference"
TOTALS = re.compile(r"^api parity: (\d+)/(\d+) names, (\d+)/(\d+) parameters$", re.MULTILINE)


def compared(facts: Path) -> tuple[subprocess.CompletedProcess[str], tuple[int, ...]]:
    """What a strict comparison comes to, and its totals: names had and asked for, and the same of parameters."""
    command = [sys.executable, str(REFERENCE / "check_api.py"), "--strict", "--tier", "core,commands"]
    command += ["--map", str(REFERENCE / "left_out.json")]
    done = subprocess.run([*command, "--api", str(facts)], capture_output=True, text=True, check=False)
    (totals,) = TOTALS.findall(done.stdout) or [()]
    return done, tuple(map(int, totals))


def test_no_name_and_no_parameter_is_missing() -> None:
    done, totals = compared(REFERENCE / "api.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert totals[0] == totals[1] > 1000
    assert totals[2] == totals[3] > 1000


def test_what_is_left_out_exists_in_the_original_and_not_here() -> None:
    facts = json.loads((REFERENCE / "api.json").read_text(encoding="utf-8"))
    for entry in json.loads((REFERENCE / "left_out.json").read_text(encoding="utf-8")):
        address, _, name = entry.partition(":")
        assert address in facts["modules"]
        assert not name or name in facts["modules"][address]["names"]
        assert owner_of(address, name) is None if name else address not in NAMES


def test_one_more_name_of_the_original_would_be_noticed(tmp_path: Path) -> None:
    facts = json.loads((REFERENCE / "api.json").read_text(encoding="utf-8"))
    module = facts["modules"]["accelerate.utils.torch_xla"]
    module["names"]["uninstall_xla"] = module["names"]["install_xla"]
    facts["modules"] = {"accelerate.utils.torch_xla": module}
    changed = tmp_path / "api.json"
    changed.write_text(json.dumps(facts), encoding="utf-8")
    done, totals = compared(changed)
    assert (done.returncode, totals) == (1, (1, 2, 1, 1))
    assert "uninstall_xla" in done.stdout
