"""The memory of this process: what the allocator keeps of freed tensors goes back to the system."""

import ctypes


def release_memory() -> None:
    """Give back what has been freed. glibc keeps freed blocks of up to 32 MiB, and the layers of a model leave many behind as they are packed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own; other C libraries keep less
    if trim is not None:
        trim(0)
