"""The stages of a model that is spread over devices: layers, caches, and weights that stream."""
