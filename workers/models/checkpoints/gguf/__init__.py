"""Models in GGUF files, as llama.cpp writes and reads them (ggml's `docs/gguf.md`): the container,
its formats of numbers, and a folder in the Hugging Face layout that stands for such a file."""
