"""`accel check-parity`: whether a plan of several processes computes what one process computes.

`command` starts the runs. `recording` notes in each of their processes what every optimizer step computes, with dropout
turned off by `dropout`. `variation` notes what makes two runs of a script differ by itself. `comparison` finds what
differs between the notes, `causes` says why.
"""

from __future__ import annotations

__all__: tuple[str, ...] = ()
