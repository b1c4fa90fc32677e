"""Quantised checkpoints, decoded as they are read: AWQ, GPTQ, FP8 and compressed-tensors."""
