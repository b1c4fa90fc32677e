"""Where tensors live and how one waits for them. Filled by `cpu` and `cuda`; nothing else asks which device it is on."""
