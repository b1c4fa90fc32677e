"""The report: one HTML page that needs nothing else, and the pictures that stand in it, each a file
too.

Shows what `findings.py` found; computes nothing. Light and dark as the reader's system is, and
narrow enough for a phone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.launch.files.charts import escape
from dovetail.launch.profiling.advice import Advice
from dovetail.launch.profiling.findings import Findings
from dovetail.launch.profiling.pictures import SAMPLER
from dovetail.launch.profiling.tables import (
    NOT_AVAILABLE,
    bound_rows,
    machine_rows,
    number,
    share,
    table_of,
)

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
    if not (of_use := [one for one in advice if one.tells]):
        return "<p>No change is predicted to be faster.</p>"
    rows = []
    for one in of_use:
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
    return table_of(heads, rows, 2)


def _bubbles(told: Mapping[str, Any]) -> str:
    rows = [
        (f"after {b['after']}, before {b['before']}", f"{b['ms']:.3f}") for b in told["bubbles"][:6]
    ]
    return (
        "<p>Where neither draft nor target works:</p>" + table_of(("bubble", "ms a round"), rows, 1)
        if rows
        else ""
    )


def _bounds(told: Mapping[str, Any]) -> str:
    return table_of(("figure", "this run", "at best", "bound"), bound_rows(told), 1, 2)


def _machine(told: Mapping[str, Any]) -> str:
    rows = [(what, value) for what, value in machine_rows(told)]
    return table_of(("reading", "value"), rows, 9)


def _spans(told: Mapping[str, Any]) -> str:
    rows = [(name, f"{ms:.3f}") for name, ms in told["round_ms"].items()]
    note = (
        "Parts of a span (linears of verify, level of draft) count in it once more. What "
        "each means: dovetail/protocol/spans.py."
    )
    missed = f" {told['missed']} spans were gone before they were read." if told["missed"] else ""
    return table_of(("span", "ms a round"), rows, 1) + f"<p class='soft small'>{note}{missed}</p>"
