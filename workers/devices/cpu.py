"""The CPU: threads, and how its arithmetic is named in a fingerprint."""

import psutil
import torch


def set_threads(threads: int) -> None:
    """Use `threads` threads for each operation and one operation at a time; a second thread between operations only disturbs the first."""
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


def library() -> str:
    """Version of torch, instruction set and threads: each can change a rounding."""
    return f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}-{torch.get_num_threads()}t"


def free_bytes() -> int:
    """Memory that is free for a process of ours."""
    free: int = psutil.virtual_memory().available
    return free
