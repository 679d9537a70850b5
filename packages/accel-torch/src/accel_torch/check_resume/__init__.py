"""`accel check-resume`: check that a run resumed from a checkpoint continues exactly like the run that saved it.

`command` starts the runs. `recording` records the results of training in each process, as the digests of `digests`.
`comparison` finds the first difference.
"""

from __future__ import annotations

__all__: tuple[str, ...] = ()
