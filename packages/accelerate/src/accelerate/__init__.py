"""Drop-in addresses: scripts written for `accelerate` run on accel-torch unchanged."""
