"""What the processes of a run do: each keeps one status record, and every report reads these records.

`record` is the file of a process, `seconds` the part of it with the time by category, and `monitor` the thread that
publishes it. `report` describes hangs, `processes` shows a run from outside, `goodput` adds up its time, and `runs`
finds the launchers of this machine.
"""
