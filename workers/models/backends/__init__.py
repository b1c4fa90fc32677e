"""Back ends that compute the layers of a model: C++ kernels, torch, and stages on a device."""
