"""Heterogeneous speculation against streaming the weights to an accelerator (Dovetail paper,
Appendix B). Offloading streams all of them over the bus in every pass; speculation across two
devices is right where a token costs less than that (equation 6)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Offloading:
    """Rates of a bus, 10^9 bytes a second."""

    needed_gb_s: float
    """At which offloading, a token a pass, would draw level."""
    bus_gb_s: float | None
    """That of the bus there is; None: there is no accelerator."""

    def in_words(self) -> str:
        """Return whether heterogeneous speculation is right here, and why."""
        if self.bus_gb_s is None:
            return (
                "there is no accelerator here to stream the weights to (its bus would have "
                f"to carry {self.needed_gb_s:.1f} GB/s)"
            )
        if self.bus_gb_s < self.needed_gb_s:
            return (
                f"right: offloading a token a pass would need {self.needed_gb_s:.1f} GB/s "
                f"over a bus that carries {self.bus_gb_s:.1f} at best"
            )
        return (
            f"wrong: the bus carries up to {self.bus_gb_s:.1f} GB/s, and offloading a token "
            f"a pass draws level at {self.needed_gb_s:.1f}"
        )
