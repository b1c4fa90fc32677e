"""Other engines that `dovetail bench` compares from a checkout: transformers, llama.cpp and
llama-server, each in a process of its own. `kinds.py` has them by the names of their methods."""
