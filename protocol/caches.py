"""The folder of a user's caches, for every process that keeps something between two starts."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of what is kept between starts: dovetail in $XDG_CACHE_HOME, else in
    ~/.cache. It need not be there.

    For a user without a home it begins with "~", and there is no place for it.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            base = Path("~/.cache")
    return base / "dovetail"
