"""`accel check-resume`: whether a run that is loaded from a checkpoint goes on as the run that saved it.

`command` starts the runs. `recording` notes in each of their processes what the training computes, as digests of
`digests`. `comparison` names the first difference.
"""

from __future__ import annotations

__all__: tuple[str, ...] = ()
