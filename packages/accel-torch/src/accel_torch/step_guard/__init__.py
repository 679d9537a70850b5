"""The guard of training steps: `StepGuard` in `kwargs_handlers` of an Accelerator switches it on.

`config` has the settings. `window` collects the losses and samples of a step, `history` decides whether it is good, and
`judge` asks it before each step. After a bad one, `first_module` and `diagnosis` find the cause, `events` records it,
and `rollback` and `buffers` put back what it has changed.
"""
