"""Training large language models with Megatron-LM: tensors, layers, the sequence and experts sharded over processes."""
