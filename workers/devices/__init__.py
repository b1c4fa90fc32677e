"""Devices: where tensors live and how one waits for them."""
