"""The guard of training steps: `StepGuard` in `kwargs_handlers` of an Accelerator switches it on.

`config` has the settings, `judge` the verdicts, `history` the limits of spikes, `window` the losses and samples of a
step, `rollback` the snapshots, `diagnosis` the cause of a bad step, and `events` its record.
"""
