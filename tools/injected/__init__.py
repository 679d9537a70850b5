"""The sweeps of `tools/reliability.py`: faults of one class each, with what must hold after every one of them."""
