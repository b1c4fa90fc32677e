"""Models in GGUF files (ggml's `docs/gguf.md`): container, number formats, and a Hugging Face
folder for each."""
