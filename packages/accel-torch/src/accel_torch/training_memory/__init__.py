"""Memory of training, before the launch: one step of a plan under fake tensors and a fake process group."""
