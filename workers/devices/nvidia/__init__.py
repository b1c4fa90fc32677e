"""Functions of ours for NVIDIA's GPUs: compiled by NVRTC, kept in a cache, launched by the
driver."""
