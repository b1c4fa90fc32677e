"""A check of `dovetail doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; `advice` is what to do, empty where nothing is."""

    name: str
    ok: bool
    found: str
    advice: str = ""
