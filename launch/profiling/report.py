"""The report: one HTML page that needs nothing else, and the pictures that stand in it, each a file
too.

Shows what `findings.py` found; computes nothing. Light and dark as the reader's system is, and
narrow enough for a phone.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dovetail.launch.files.charts import Curve, Panel, draw_panels, escape
from dovetail.launch.profiling import drawing
from dovetail.launch.profiling.advice import Advice
from dovetail.launch.profiling.devices import STRETCHES
from dovetail.launch.profiling.findings import Findings
from dovetail.launch.profiling.samplers import NO_CARD
from dovetail.launch.profiling.timeline import COORDINATOR

NOT_AVAILABLE = "not available"
SAMPLER = "sampler: its process"
WAITS = ("draft", "target", "coordinator", "transport", "no work")
NOT_JUDGED = "; not judged: other programs ran"
LEAST = 5e-4
"""A share that is not 0.0 %."""
PARTS = {
    "draft": "draft",
    "verify": "target",
    "transport": "link",
    "queue": "queue",
    "coordinator": "coordinator",
}
"""Part of a round -> its colour."""
STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5a636d;--page:#f6f7f9;--card:#ffffff;--line:#dde1e6;--good:#2f7d3c;--mark:#0b62a4}
@media (prefers-color-scheme:dark){:root{--ink:#e6e8ea;--soft:#9aa4ae;--page:#0f1215;--card:#16191d;--line:#2c3238;--good:#7ccf8a;--mark:#63b3ed}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1.5rem;margin:.2em 0}h2{font-size:1.15rem;margin:0 0 .6em}
.soft{color:var(--soft)}.small{font-size:.86rem}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px;margin:16px 0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:10px;margin:16px 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 12px}
.card b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:14px}
.pictures{margin-bottom:12px}.pictures figure{margin:0;min-width:0}.picture{overflow-x:auto}
.pictures svg{width:100%;min-width:400px;height:auto;display:block}
figcaption{font-size:.86rem;color:var(--soft);margin-top:4px}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.92rem}
th,td{text-align:left;padding:5px 10px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--soft)}td.n,th.n{text-align:right;white-space:nowrap}
code{font-size:.85em;white-space:nowrap}
ul{padding-left:1.2em;margin:.3em 0}li{margin:.35em 0}
.gain{color:var(--good);font-weight:600}.least{color:var(--soft)}
a{color:var(--mark)}
.aside{display:none}
@media (max-width:460px){
.aside{display:inline}
table,tbody,tr,td{display:block}tr:has(th){display:none}tr{padding:6px 0;border-bottom:1px solid var(--line)}
td,td.n{display:flex;justify-content:space-between;gap:12px;border:0;padding:2px 0;text-align:right;white-space:normal}
td::before{content:attr(data-label);color:var(--soft);text-align:left;white-space:nowrap}
td:first-child{font-weight:600}td.text{display:block;text-align:left}td.text::before{content:none}
}
"""


def pictures(findings: Findings) -> dict[str, str]:
    """Name -> SVG: all that there is something to draw for."""
    told = findings.told
    found = {
        "devices": drawing.stacked(
            "What every device did",
            {name: list(_device(device)) for name, device in told["devices"].items()},
        )
    }
    if told["parts_ms"]:
        found["parts"] = drawing.stacked(
            "Where a round's time goes",
            {f"a round, {told['round_wall_ms']:.2f} ms": list(_parts(told))},
        )
    names = [*told["devices"]]
    for number, fall in enumerate(findings.waterfalls):
        found[f"round-{number}"] = drawing.gantt(
            fall, names, title=f"{fall.title[0].upper()}{fall.title[1:]}"
        )
    found.update(
        {
            f"over-time-{_plain(panel.title, place)}": draw_panels(
                f"{panel.title}: busy share over time", [replace(panel, title="")]
            )
            for place, panel in enumerate(_over_time(findings))
        }
    )
    found.update(_curves(told))
    return found


def _device(device: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    colour = device["roles"][0] if device["roles"][0] in drawing.COLOURS else "target"
    yield f"{device['roles'][0]} busy", colour, device["busy"] - device["ahead"]
    yield "ahead", "ahead", device["ahead"]
    for name in WAITS:
        yield (
            ("no work" if name == "no work" else f"waits: {name}"),
            drawing.OF_WAIT[name],
            device["waiting"].get(name, 0.0),
        )


def _parts(told: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    for name, colour in PARTS.items():
        yield name, colour, told["parts_ms"][name] / told["round_wall_ms"]
    if told["unaccounted_share"] >= LEAST:
        yield "unaccounted", "idle", told["unaccounted_share"]


def _plain(name: str, place: int) -> str:
    """A worker's name, if a file can have it; else its place."""
    return name if re.fullmatch(r"\w[\w.-]{0,63}", name, re.ASCII) else str(place)


def _over_time(findings: Findings) -> list[Panel]:
    """For each worker what its spans say, and what the sampler says of its process."""
    width = findings.told["wall_s"] / STRETCHES
    panels = []
    for name, shares in findings.busy.items():
        if name == COORDINATOR:
            continue
        curves = [
            Curve("spans", [((place + 0.5) * width, share) for place, share in enumerate(shares)])
        ]
        if len(findings.sampled.get(name, ())) > 1:
            curves.append(Curve(SAMPLER, findings.sampled[name], dashed=True))
        panels.append(Panel(name, "seconds", "busy share", curves, level=1.0))
    return panels


def _curves(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    curves, bounds = told["curves"], told["bounds"]
    if curves["t_v"]:
        measured = [(int(rows), seconds * 1e3) for rows, seconds in curves["t_v"].items()]
        lines = [Curve("T_V as measured", measured)]
        if curves["t_v_limit"]:
            lines.append(
                Curve(
                    "limit of the hardware",
                    [(int(rows), seconds * 1e3) for rows, seconds in curves["t_v_limit"].items()],
                    dashed=True,
                )
            )
        if bounds.get("pass"):
            rows, at = bounds["pass"]["rows"], bounds["pass"]["t_v_s"] * 1e3
            lines.append(Curve("this run", [(rows, at)], marks=True))
        yield (
            "passes",
            draw_panels("A pass of the target", [Panel("", "rows, M", "milliseconds", lines)]),
        )
    if len(curves["speedup_by_gamma"]) > 1:
        gains = [(int(gamma), gain) for gamma, gain in curves["speedup_by_gamma"].items()]
        taus = [(int(gamma), tau) for gamma, tau in curves["tau_by_gamma"].items()]
        lines = [Curve("predicted speed-up", gains), Curve("predicted tau", taus, dashed=True)]
        if run := curves["run"]:
            lines.append(
                Curve(
                    "this run",
                    [(run["gamma"], run["speedup"]), (run["gamma"], run["tau"])],
                    marks=True,
                )
            )
        yield (
            "gamma",
            draw_panels(
                "Larger and smaller trees, predicted",
                [
                    Panel(
                        "",
                        "gamma, nodes verified",
                        "over the target alone; tokens",
                        lines,
                        level=1.0,
                    )
                ],
            ),
        )
    if len(told["accepted_per_position"]) > 1:
        points = [(place + 1, share) for place, share in enumerate(told["accepted_per_position"])]
        yield (
            "positions",
            draw_panels(
                "Accepted at each depth",
                [
                    Panel(
                        "",
                        "depth in the tree",
                        "share of the drafted rounds",
                        [Curve("accepted", points)],
                    )
                ],
            ),
        )


# -- the page --------------------------------------------------------------------------------------

CAPTIONS = {
    "devices": "Shares of the whole run, from spans. What a device waits for is what somebody "
    "else did meanwhile.",
    "over": "Solid: from spans.",
    "parts": "From verdict to verdict, as the coordinator keeps account. Transport: until the "
    "receiver has a core and takes the message.",
    "passes": "Between the flat part, where reading the weights takes the time, and the steep "
    "one, where arithmetic does.",
    "gamma": "Replayed from wider trees that were sounded in short replies, with the passes "
    "that were measured, and set in proportion so that the settings of "
    "this run come to what it had; 0 is the target alone.",
    "positions": "Of the drafted rounds.",
}


def page(findings: Findings, drawn: Mapping[str, str], made: str) -> str:
    """The whole report; `made`: when, and by which version."""
    told = findings.told
    rounds, over_time = (
        [name for name in drawn if name.startswith(kind)] for kind in ("round-", "over-time-")
    )
    body = [
        "<h1>dovetail profile</h1><p "
        f"class='soft'>{escape(told['title'])}<br>{escape(told['workload'])}</p>",
        _cards(told),
        _section(
            "Verdict",
            f"<ul>{''.join(f'<li>{escape(words)}</li>' for words in told['verdict']['in_words'])}</ul>",
        ),
        _section("What would help", _advice(findings.advice)),
        _section("Devices", _figures(drawn, ["devices", *over_time]) + _devices(told)),
        _section("Rounds", _figures(drawn, ["parts", *rounds]) + _bubbles(told)),
        _section("Bounds", _bounds(told) + _figures(drawn, ["passes", "gamma", "positions"])),
        _section("Machine", _machine(told)),
        _section("Spans", _spans(told)),
        f"<p class='soft small'>{escape(made)}. trace.json opens in ui.perfetto.dev.</p>",
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    )
    head += f"<title>dovetail profile</title><style>{STYLE}</style>"
    return (
        "<!doctype html><html "
        f"lang='en'><head>{head}</head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _figures(drawn: Mapping[str, str], names: Sequence[str]) -> str:
    cells = [
        "<figure><div class='picture' "
        f"tabindex='0'>{drawn[name]}</div>{_caption(name, drawn[name])}</figure>"
        for name in names
        if name in drawn
    ]
    return f"<div class='pictures'>{''.join(cells)}</div>" if cells else ""


def _caption(name: str, picture: str) -> str:
    kind = name.partition("-")[0]
    dashed = (
        " Dashed: CPU time of the process, by the kernel's count."
        if kind == "over" and SAMPLER in picture
        else ""
    )
    return (
        f"<figcaption>{escape(CAPTIONS.get(kind, '') + dashed)}<span class='aside'> The "
        "picture scrolls sideways.</span></figcaption>"
    )


def _cards(told: Mapping[str, Any]) -> str:
    bounds, energy = told["bounds"], told["energy"]["joules_per_token"]
    cards = [
        (
            "tokens/s",
            number(told["tokens_per_s"], 1),
            f"of the rounds; {told['tokens'] / told['wall_s']:.1f} with all else",
        ),
        *(
            [
                (
                    "speed-up",
                    number(bounds["speedup"], 2),
                    f"of {number(bounds['most_speedup'], 2)} at most",
                )
            ]
            if bounds.get("drafted")
            else []
        ),
        ("tau", number(told["tau"], 2), f"tokens a round; {told['tokens']} in {told['rounds']}"),
        (
            "ms a round",
            number(told["round_wall_ms"], 2),
            f"{number(bounds['t_v_s'] * 1e3 if bounds else None, 2)} of them a pass",
        ),
        *(
            (name, f"{device['busy']:.0%}", "busy")
            for name, device in told["devices"].items()
            if name != "coordinator"
        ),
        (
            "joules/token",
            number(energy, 2),
            NOT_AVAILABLE if energy is None else "all that counts energy",
        ),
    ]
    return f"<div class='cards'>{''.join(_card(*map(escape, card)) for card in cards)}</div>"


def _card(name: str, value: str, beside: str) -> str:
    return (
        f"<div class='card'><span class='soft small'>{name}</span><b>{value}</b><span "
        f"class='soft small'>{beside}</span></div>"
    )


def _advice(advice: Sequence[Advice]) -> str:
    if not advice:
        return "<p>Nothing was looked at: no round was drafted.</p>"
    rows = []
    for one in (one for one in advice if one.tells):
        kind = "gain" if one.worth else "least"
        flags = (
            f"<br>{' '.join(f'<code>{escape(flag)}</code>' for flag in one.flags)}"
            if one.flags
            else ""
        )
        change = f"{escape(one.what)}{flags}<br><span class='soft small'>{escape(one.basis)}</span>"
        other = "" if one.same else "<br><span class='soft small'>other tokens</span>"
        gain = (
            f"<span class='{kind}'>{'' if one.certain else 'up to '}{one.gain:.2f}x</span>{other}"
        )
        rows.append(
            f"<tr><td class='n' data-label='predicted'><span>{gain}</span></td><td "
            f"class='text'>{change}</td></tr>"
        )
    return (
        "<div class='wide'><table><tr><th class='n'>predicted</th><th>change, and how its "
        f"gain was found</th></tr>{''.join(rows)}</table></div>"
    )


def _devices(told: Mapping[str, Any]) -> str:
    heads = ("device", "on", "busy, spans", "its process", "its cores", "MB", "clock within us")
    rows = [
        (
            name,
            f"{d['device']}{', cores ' + d['cores'] if d['cores'] else ''}{', node ' + d['node'] if d['node'] else ''}",
            share(d["busy"]),
            share(
                d["sampled"]["gpu"] if d["sampled"]["gpu"] is not None else d["sampled"]["process"]
            ),
            share(d["sampled"]["cores"]),
            number(d["rss_mb"], 0),
            number(d["clock_bound_us"], 0),
        )
        for name, d in told["devices"].items()
    ]
    return _table(heads, rows, 2)


def _bubbles(told: Mapping[str, Any]) -> str:
    rows = [
        (f"after {b['after']}, before {b['before']}", f"{b['ms']:.3f}") for b in told["bubbles"][:6]
    ]
    return (
        "<p>Where neither draft nor target works:</p>" + _table(("bubble", "ms a round"), rows, 1)
        if rows
        else ""
    )


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


def _bounds(told: Mapping[str, Any]) -> str:
    return _table(("figure", "this run", "at best", "bound"), bound_rows(told), 1, 2)


def _machine(told: Mapping[str, Any]) -> str:
    rows = [(what, value) for what, value in machine_rows(told)]
    return _table(("reading", "value"), rows, 9)


def machine_rows(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the samplers say; "not available" and why where they cannot."""
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
        yield (
            f"{name} {gpu['name']}",
            f"{share(gpu['busy'])} busy by its driver, {gpu['most_used_bytes'] / 1e9:.1f} GB "
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


def _spans(told: Mapping[str, Any]) -> str:
    rows = [(name, f"{ms:.3f}") for name, ms in told["round_ms"].items()]
    note = (
        "Parts of a span (linears of verify, level of draft) count in it once more. What "
        "each means: dovetail/protocol/spans.py."
    )
    missed = (
        f" {told['missed']} spans were gone before they were looked at." if told["missed"] else ""
    )
    return _table(("span", "ms a round"), rows, 1) + f"<p class='soft small'>{note}{missed}</p>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], first: int, last: int = 99) -> str:
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
    """With a digit behind the point, and no sign before nothing."""
    return f"{value:.1%}" if abs(value) >= LEAST else "0.0%"


def share(value: float | None) -> str:
    return NOT_AVAILABLE if value is None else f"{value:.0%}"
