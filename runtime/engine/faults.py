"""Faults of our own: what is contained where it concerns one session, and what never is."""

EXITS = (KeyboardInterrupt, SystemExit, GeneratorExit)


def reraise_exits(error: BaseException) -> None:
    """Let what ends the process pass; everything else, a library's panic too, which is no
    `Exception`, is the caller's to contain."""
    if isinstance(error, EXITS):
        raise error


def as_raised(error: BaseException) -> BaseException:
    """Return an exception as it was raised: out of a generator a StopIteration comes as a
    RuntimeError."""
    cause = error.__cause__
    return cause if isinstance(error, RuntimeError) and isinstance(cause, StopIteration) else error


def told(error: BaseException) -> str:
    """An exception in a few words and one line, whatever its own may be."""
    try:
        words = " ".join(str(error)[:1000].split())[:300]
    except Exception:
        words = ""
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
