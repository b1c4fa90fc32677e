"""Checkpoints whose weights are quantised, each matrix as codes and scales in its own tensors: AWQ,
GPTQ, FP8 and compressed-tensors. They are decoded as they are read."""
