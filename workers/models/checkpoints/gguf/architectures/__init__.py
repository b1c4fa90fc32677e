"""The architectures of llama.cpp that are read: configurations, and names of tensors."""
