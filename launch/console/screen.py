"""The pages of `dovetail top` for 80 columns or more. Everything shown by colour is also shown by
marks or words; rich obeys NO_COLOR."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dovetail.launch.console.terminal import counted

Picture = dict[str, Any]
BLOCKS = " ▁▂▃▄▅▆▇█"
BAR = 8
TREND, WIDE_TREND = 14, 48  # characters of a curve; each is a sample of about a second


def as_bar(share: float) -> str:
    filled = round(BAR * min(1.0, share))
    return "█" * filled + "░" * (BAR - filled)


def as_trend(values: Sequence[float | None], top: float, width: int = TREND) -> str:
    """A curve in blocks, the last value at its right end."""
    letters = "".join(
        " "
        if value is None or not top
        else BLOCKS[round((len(BLOCKS) - 1) * max(0.0, min(1.0, value / top)))]
        for value in values
    )
    return letters.rjust(width)


def as_lines(title: str, lines: Sequence[str]) -> Iterator[RenderableType]:
    if lines:
        yield Text(title, "bold")
        yield from (Text(f"  {line}") for line in reversed(lines))


def as_table(*columns: tuple[str, str]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1), show_edge=False
    )
    for name, side in columns:
        table.add_column(name, justify="right" if side == "right" else "left", overflow="fold")
    return table


def as_pieces(words: Iterable[str]) -> Text:
    """ "name [b]value" each, the value in bold."""
    parts = [
        part
        for word in words
        for part in (word.partition("[b]")[0], (word.partition("[b]")[2], "bold"), "  ")
    ]
    return Text.assemble(*parts)


def as_number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def as_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def as_span(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


PAGES = ("overview", "tree", "sessions", "workers")
SHOWN_DECISIONS, SHOWN_POSITIONS = 3, 7
DOING = {
    "no work": "no work",
    "draft": "for draft",
    "target": "for target",
    "coordinator": "for coord.",
}
"""Names of the reasons for which a worker waits."""


@dataclass
class Standing:
    """The user's choices, and the state of the connection."""

    page: int = 0
    session: int | None = None  # the session whose tree is shown; None for the newest
    paused: bool = False
    ended: bool = False
    lost: str = ""  # why there is no answer; empty while connected


def page(picture: Picture, standing: Standing, console: Console) -> RenderableType:
    """One page, as high as the terminal."""
    parts = [_head(picture, standing), *_parts(picture, PAGES[standing.page], standing.session)]
    return _cut(console, parts, _foot(standing))


def everything(picture: Picture) -> RenderableType:
    """All pages, one after the other."""
    return Group(
        _head(picture), *(part for name in PAGES for part in (Text(), *_parts(picture, name, None)))
    )


def _cut(console: Console, parts: Sequence[RenderableType], foot: Text) -> RenderableType:
    lines = console.render_lines(Group(*parts), console.options.update(height=None), pad=False)
    room = max(1, console.height - 1)
    more = len(lines) > room
    kept = [
        Text.assemble(
            *((segment.text, segment.style or "") for segment in line),
            no_wrap=True,
            overflow="crop",
        )
        for line in lines[: room - more]
    ]
    rest = (
        [Text(f"… {len(lines) - room + 1} more lines: a taller terminal shows them", style="dim")]
        if more
        else []
    )
    return Group(*kept, *rest, *[Text()] * (room - len(kept) - len(rest)), foot)


def _parts(picture: Picture, name: str, chosen: int | None) -> Iterator[RenderableType]:
    if name == "overview":
        yield from _overview(picture)
    elif name == "tree":
        yield from tree_lines(picture["tree"])
    elif name == "sessions":
        yield _sessions(picture["sessions"], chosen)
        yield from _pairs(picture["pairs"])
        yield from as_lines("last decisions", picture["decisions"])
    else:
        yield from _workers(picture["workers"])


def _head(picture: Picture, standing: Standing | None = None) -> RenderableType:
    coordinator, speculation = picture["coordinator"], picture["speculation"]
    state = Text()
    if standing is not None:
        state = Text("paused", "reverse") if standing.paused else Text("live", "green")
    about = f"  coordinator pid {coordinator['pid']}, up {as_span(coordinator['uptime_s'])}  "
    first = Text.assemble(("dovetail", "bold"), about, state)
    second = Text.assemble(("speculation ", "bold"), speculation["words"])
    reasons = [
        Text(f"  - {reason}") for reason in picture["reasons"] if reason not in speculation["why"]
    ]
    lost = []
    if standing is not None and standing.lost:
        lost = [Text(f"LOST: {standing.lost}; trying again", "bold red")]
    others = picture.get("others")
    beside = [Text(f"other programs on this machine {others['words']}")] if others else []
    return Group(first, *lost, second, *reasons, *beside)


def _foot(standing: Standing) -> Text:
    pages = [
        (f" {name} ", "reverse" if place == standing.page else "")
        for place, name in enumerate(PAGES)
    ]
    whose = "newest" if standing.session is None else str(standing.session)
    return Text.assemble(
        "q quit  p pause  ←→ ", *pages, f"  ↑↓ session: {whose}", no_wrap=True, overflow="crop"
    )


def _overview(picture: Picture) -> Iterator[RenderableType]:
    figures, counts = picture["figures"], picture["counts"]
    told = (
        ("tokens/s", as_number(figures["tokens_per_s"], 1)),
        ("tau", as_number(figures["tau"], 2)),
        ("accepted", as_percent(figures["acceptance_rate"])),
        ("nodes", as_number(figures["nodes_a_round"], 1)),
        ("hit", as_percent(figures["hit_rate"])),
        ("plain", as_percent(figures["plain_share"])),
    )
    yield as_pieces(f"{name} [b]{value}" for name, value in told)
    totals = (
        ("sessions running", "sessions"),
        ("finished", "finished"),
        ("failed", "failed"),
        ("cancelled", "cancelled"),
        ("refused", "refused_requests"),
    )
    yield as_pieces(f"{word} [b]{counts[name]}" for word, name in totals)
    yield Text()
    yield _devices(picture["workers"])
    yield as_pieces(_process(one) for one in picture["processes"])
    for name in ("tokens_per_s", "tau"):
        values = [value for _, value in picture["history"][name]][-WIDE_TREND:]
        top = max((value for value in values if value is not None), default=0)
        yield Text.assemble(
            f"{name.replace('_per_', '/'):<12}",
            (as_trend(values, top, WIDE_TREND), "cyan"),
            f"  0 to {as_number(top, 1)}",
        )
    positions = enumerate(figures["accepted_per_position"][:SHOWN_POSITIONS], 1)
    shares = "  ".join(f"{place}: {as_percent(share)}" for place, share in positions)
    yield Text(f"by position {shares or 'no recent round with a tree'}")
    parts = (f"{name} {as_number(value, 1)}" for name, value in figures["round_ms"].items())
    yield Text(f"a round, ms {'  '.join(parts)}")
    yield Text()
    yield from as_lines("last decisions", picture["decisions"][-SHOWN_DECISIONS:])


def _process(process: Picture) -> str:
    memory = "-" if process["rss_mb"] is None else f"{process['rss_mb']:,.0f} MB RSS"
    return f"{process['name']} (pid {process['pid']}) [b]CPU {as_percent(process['cpu'])}, {memory}"


def _devices(workers: Sequence[Picture]) -> RenderableType:
    if not workers:
        return Text("no worker is registered")
    left = (("worker", ""), ("device", ""), ("busy", ""), ("lately", ""))
    table = as_table(*left, ("waited for", "right"), ("just now", ""), ("sess.", "right"))
    for worker in workers:
        shares = [share for _, share in worker["history"]][-TREND:]
        standing = "".join(f" {word}" for word in ("standby", "leaving", "stuck") if worker[word])
        name = Text(worker["name"] + standing)
        share = as_percent(worker["busy"])
        busy = Text.assemble((as_bar(worker["busy"] or 0.0), "cyan"), f" {share:>5}")
        waited = "" if worker.get("waited_for") is None else as_percent(worker["waited_for"])
        now = DOING.get(worker["waiting"], "idle") if worker["waiting"] else "works"
        now = now if worker["busy"] is not None else ""
        device, trend = Text(worker["device"]), Text(as_trend(shares, 1.0), "cyan")
        table.add_row(name, device, busy, trend, waited, now, str(worker["sessions"]))
    return table


def _sessions(sessions: Sequence[Picture], chosen: int | None) -> RenderableType:
    if not sessions:
        return Text("no session has had a round in the last half minute")
    table = as_table(
        ("session", "right"),
        ("draft", ""),
        ("target", ""),
        *((name, "right") for name in ("length", "round", "tau", "accepted", "tokens/s", "last")),
    )
    for one in sessions:
        last = "now" if one["quiet_s"] < 2 else f"{one['quiet_s']:.0f} s"
        rates = (as_number(one["tau"], 2), as_percent(one["acceptance_rate"]))
        figures = (*rates, as_number(one["tokens_per_s"], 1), last)
        number = f"{'> ' if one['session'] == chosen else ''}{one['session']}"
        pair = (Text(one["draft"] or "none"), Text(one["target"]))
        table.add_row(number, *pair, str(one["length"]), str(one["round"]), *figures)
    return table


def _pairs(pairs: Sequence[Picture]) -> Iterator[RenderableType]:
    if not pairs:
        return
    numbers = ("rounds", "hit", "gamma", "tokens/s", "alone", "predicted")
    table = as_table(("pair", ""), ("drafting", ""), *((name, "right") for name in numbers))
    for pair in pairs:
        rates = (
            as_number(pair[name], 1)
            for name in ("tokens_per_s", "alone_tokens_per_s", "predicted_tokens_per_s")
        )
        on = "on" if pair["speculating"] else "off"
        names = Text(f"{pair['draft']} and {pair['target']}")
        hits, gamma = as_percent(pair["hit_rate"]), as_number(pair["gamma"], 1)
        table.add_row(names, on, str(pair["rounds"]), hits, gamma, *rates)
    yield Text()
    yield table


def _workers(workers: Sequence[Picture]) -> Iterator[RenderableType]:
    if not workers:
        yield Text("no worker is registered")
    for worker in workers:
        yield Text(f"{worker['name']} ({' + '.join(worker['roles'])})", "bold")
        table = Table.grid(padding=(0, 2))
        for name, value in _facts(worker):
            table.add_row(Text(f"  {name}", "dim"), Text(value, overflow="fold"))
        yield table


def _facts(worker: Picture) -> Iterator[tuple[str, str]]:
    weights = f", weights {worker['weights']}" if worker["weights"] else ""
    yield "model", worker["model"] + weights
    node = f", memory node {worker['node']}" if worker["node"] else ""
    cores = f", cores {worker['cores']}" if worker["cores"] else ""
    yield (
        "place",
        f"{worker['device']}, {worker['host']}{cores}{node}, "
        f"{counted(worker['threads'], 'thread')}, pid {worker['pid']}",
    )
    yield "memory", f"{worker['rss_mb']:,.0f} MB RSS"
    yield "binding", worker["binding"] or "not reported"
    bound, size = worker["clock_bound_us"], worker["feature_bytes"]
    clock = "not compared" if bound is None else f"known within ± {bound:.0f} µs"
    features = f", features {size} bytes a token" if size else ""
    yield (
        "link",
        f"round trip at best {as_number(worker['round_trip_us'], 0)} µs, clock {clock}, "
        f"{as_number(worker['bytes_per_round'], 0)} bytes a round{features}",
    )
    if worker["fingerprint"]:
        yield "fingerprint", worker["fingerprint"]
    if worker["blocks"] or worker["damaged_blocks"]:
        stored = f"{counted(worker['blocks'], 'stored block')} of prompts"
        yield "cache", f"{stored}, {worker['damaged_blocks']} deleted as damaged"
    yield ("epoch", f"{worker['epoch']}, {worker['stale']} stale commands dropped")


MARKS = {
    "a": ("✓", "accepted", "bold green"),
    "r": ("✗", "rejected", "red"),
    "n": ("·", "not verified", "dim"),
    "b": ("★", "bonus", "bold magenta"),
}


def tree_lines(tree: Picture | None) -> Iterator[RenderableType]:
    if tree is None:
        yield Text("no recent round")
        return
    hit = ", a hit" if tree["hit"] else ""
    counts = f"{tree['offered']} nodes offered, {tree['verified']} verified, {tree['accepted']} "
    counts = f"{counts}accepted{hit}" if tree["offered"] else "nothing was drafted"
    yield Text.assemble(
        ("tree ", "bold"), f"of session {tree['session']}, round {tree['round']}: {counts}"
    )
    yield Text(
        "  ".join(f"{mark} {word}" for mark, word, _ in MARKS.values())
        + "   number: rank, best first"
    )
    yield Text.assemble("● ", (tree["root"] or "root", "bold"))
    yield from _branches(tree)


def _branches(tree: Picture) -> Iterator[Text]:
    """A line for each node, below its parent; the bonus comes before its siblings."""
    bonus = len(tree["parents"])
    below: dict[int, list[int]] = {tree["bonus_parent"]: [bonus]}
    for node, parent in enumerate(tree["parents"]):
        below.setdefault(parent, []).append(node)
    waiting = [(node, "", place == 0) for place, node in enumerate(reversed(below.get(-1, [])))]
    while waiting:
        node, before, last = waiting.pop()
        yield Text.assemble(
            (before + ("└─ " if last else "├─ "), "dim"),
            _node(tree, node, bonus),
            no_wrap=True,
            overflow="ellipsis",
        )
        inner = before + ("   " if last else "│  ")
        waiting += [
            (child, inner, place == 0) for place, child in enumerate(reversed(below.get(node, [])))
        ]


def _node(tree: Picture, node: int, bonus: int) -> Text:
    if node == bonus:
        mark, _, style = MARKS["b"]
        text, rank, likely = tree["bonus"], "", ""
    else:
        mark, _, style = MARKS[tree["fates"][node]]
        text = tree["texts"][node] if tree["texts"] is not None else None
        rank, likely = f"{node + 1} ", f"  {100 * tree['likely'][node]:.0f} %"
    return Text.assemble((f"{mark} {rank}", style), (text or "", style), (likely, "dim"))
