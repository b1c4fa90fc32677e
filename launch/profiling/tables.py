"""Tables of a report as HTML, and how numbers are written in them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.launch.files.charts import escape
from dovetail.launch.profiling.samplers import NO_CARD

NOT_AVAILABLE = "not available"
LEAST = 5e-4
"""A share that is not 0.0 %."""
NOT_JUDGED = "; not judged: other programs ran"


def bound_rows(told: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(figure, what it is, its bound, the bound's name)."""
    b = told["bounds"]
    if not b:
        return []
    rows = []
    if b["drafted"]:
        rows += [
            (
                "speed-up over the target alone",
                f"{b['speedup']:.2f}",
                f"{b['most_speedup']:.2f}",
                "tau T_T / T_V (T_T with its messages)",
            ),
            (
                "gain of drafting ahead",
                f"{b['overlap_gain']:.2f}",
                f"{b['most_overlap_gain']:.2f}",
                "1 + min / max of the two phases",
            ),
        ]
    if b.get("pass"):
        found, limits = b["achieved"], b["limits"]
        rows.append(
            (
                "weights read, GB/s",
                f"{found['gb_s']:.1f}",
                f"{limits['bandwidth_gb_s']:.1f}",
                f"bandwidth ({limits['probe']})",
            )
        )
        rows.append(
            (
                "operations, 10^9/s",
                f"{found['gflop_s']:.0f}",
                f"{limits['peak_gflop_s']:.0f}",
                f"arithmetic ({limits['probe']})",
            )
        )
        least = f"{max(b['pass']['t_p_s'], b['pass']['t_c_s']) * 1e3:.2f}"
        rows.append(
            ("a pass, ms", f"{b['t_v_s'] * 1e3:.2f}", least, "the longer of reading and arithmetic")
        )
        if not b["judged"]:
            rows = [
                (name, value, most, f"{what}{NOT_JUDGED if ',' in name else ''}")
                for name, value, most, what in rows
            ]
    else:
        rows.append(("bandwidth and arithmetic", NOT_AVAILABLE, NOT_AVAILABLE, b["why_no_pass"]))
    return rows


def machine_rows(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return what the samplers say; "not available" and why where they cannot."""
    for number_, node in told["nodes"].items():
        used = (
            NOT_AVAILABLE
            if node["most_used_bytes"] is None
            else f"{node['most_used_bytes'] / 1e9:.1f} of {node['memory_bytes'] / 1e9:.1f} GB "
            "in use"
        )
        cores = (
            ", ".join(f"{core}: {share(busy)}" for core, busy in node["by_core"].items())
            if len(node["by_core"]) <= 16
            else ""
        )
        yield (
            f"node {number_}, cores {node['cores']}",
            f"{share(node['busy'])} busy{f' ({cores})' if cores else ''}; {used}; "
            f"{', '.join(node['workers']) or 'no worker'}",
        )
    for name, gpu in told["gpus"].items():
        used = gpu["most_used_bytes"]
        yield (
            f"{name} {gpu['name']}",
            f"{share(gpu['busy'])} busy by its driver, "
            f"{number(None if used is None else used / 1e9, 1)} GB "
            f"in use, bus {number(gpu['link_gb_s'], 1)} GB/s",
        )
    for name, joules in told["energy"]["joules"].items():
        yield f"energy of {name}", f"{joules:.1f} J"
    energy = told["energy"]["joules_per_token"]
    yield (
        "joules a token",
        NOT_AVAILABLE
        if energy is None
        else f"{energy:.2f} (the whole machine's, as far as it is counted)",
    )
    without = [name for name, why in told["absent"].items() if why == NO_CARD]
    if without:
        yield "GPUs", f"none here ({' and '.join(without)} not asked)"
    for name, why in told["absent"].items():
        if why != NO_CARD:
            yield name, f"{NOT_AVAILABLE}: {why}"


def table_of(
    heads: Sequence[str], rows: Sequence[Sequence[str]], first: int, last: int = 99
) -> str:
    """A table whose columns from `first` to `last` are numbers."""
    head = "".join(
        f"<th{_n(place, first, last)}>{escape(text)}</th>" for place, text in enumerate(heads)
    )

    def cell(place: int, text: str) -> str:
        label = f" data-label='{escape(heads[place], quote=True)}'" if place else ""
        return f"<td{_n(place, first, last)}{label}>{escape(text)}</td>"

    body = "".join(
        f"<tr>{''.join(cell(place, text) for place, text in enumerate(row))}</tr>" for row in rows
    )
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>"


def _n(place: int, first: int, last: int) -> str:
    return " class='n'" if first <= place <= last else ""


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float) -> str:
    """Format a share in percent, with one decimal and no sign before zero."""
    return f"{value:.1%}" if abs(value) >= LEAST else "0.0%"


def share(value: float | None) -> str:
    return NOT_AVAILABLE if value is None else f"{value:.0%}"
