"""Speculative decoding as pure functions of tensors: noise, sampling, growth of trees,
acceptance."""
