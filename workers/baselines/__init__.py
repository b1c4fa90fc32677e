"""Other engines that the benchmarks compare against; no worker uses them."""
