"""Our functions for NVIDIA's GPUs: compiled by NVRTC, cached, launched by the driver."""
