"""Descriptions of the families of models that the kernels compute."""
