"""Checkpoints whose weights are quantised, each matrix as codes and scales in tensors of its own:
AWQ, GPTQ, FP8 and compressed-tensors. They are decoded as they are read."""
