"""llama.cpp as a peer of `dovetail bench`: a process under a Python that has llama-cpp-python and
gguf, which may be another than ours."""
