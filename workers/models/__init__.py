"""Models and their parts: checkpoints, linears, the KV cache with tree slots, tree attention."""
