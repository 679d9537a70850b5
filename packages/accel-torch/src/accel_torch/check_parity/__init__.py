"""`accel check-parity`: check that a plan of several processes computes the same as one process.

`command` starts the runs. `recording` records the results of every optimizer step in each process, while `dropout`
disables dropout. `variation` records what makes two runs of the same script differ. `comparison` finds differences
between the records, and `causes` names likely causes.
"""

from __future__ import annotations

__all__: tuple[str, ...] = ()
