"""The parts of `dovetail bench --concurrency`: one streamed request, many at once, the figures of a
load under the names of `vllm bench serve`, and their presentation."""
