"""The command `substitute`: what each part of SubSpec is worth (as in its Table 2), what quantising
takes, and how well a target's substitute drafts.

The target streams all of its layers over a link of a limited rate (`link.py`), which stands for
PCIe as the CPU stands for the GPU, and is inflated so that a pass over one row and one over a tree
take what the link takes. Engines are driven directly, in one process; the last part runs real
processes.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch

from benchmarks.link import LimitedLink
from benchmarks.options import Command, option, options, report
from dovetail.launch.console.terminal import print_table
from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import VerifyItem
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import Sampling, TreeSettings, byte_count
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.runtime.text.tokenizer import TextCodec
from dovetail.workers import kernels
from dovetail.workers.drafters.model import SHARPENING, SUBSTITUTE_SHARPENING, Drafter
from dovetail.workers.drafters.shared import Lent, SharedDrafter, SharedSession
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.sizes import Matrices
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.checkpoints.tokenizer import read_tokenizer
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.substitutes.quantize import BITS
from dovetail.workers.models.substitutes.substitute import load_substitute, share, shared_cache
from dovetail.workers.sessions.results import First, Verdict
from dovetail.workers.speculation.proposal import Shape
from dovetail.workers.verifier import Verifier
from support.inflated import kept_pair
from support.opening import opening
from support.stacks import PROMPTS, complete_all, running, submit

TARGET = DEMO_FOLDER / "target"
PLAIN_TOKENS = 12
"""The target alone takes the same for every token."""
DRAFTS: Mapping[str, Mapping[str, str]] = {
    "small": {"draft.kind": "small"},
    "dovetail": {"draft.kind": "dovetail"},
    **{
        f"substitute {weights}": {"draft.kind": "substitute", "draft.weights": weights}
        for weights in ("int8", "int4", "int3", "int2")
    },
}
TREE = TreeSettings(policy="dynamic", insist=True, gamma=15, depth=8, width=4)
"""The tree with which drafts are compared."""


@dataclass(frozen=True)
class Step:
    """One line of the ablation: what is switched on."""

    name: str
    shared: bool
    sharpening: float
    waits: bool


STEPS = (
    Step("base", shared=False, sharpening=SHARPENING, waits=True),
    Step("+ shared cache", shared=True, sharpening=SHARPENING, waits=True),
    Step("+ sharpening", shared=True, sharpening=SUBSTITUTE_SHARPENING, waits=True),
    Step("+ asynchronous transfer", shared=True, sharpening=SUBSTITUTE_SHARPENING, waits=False),
)


@click.command("substitute", cls=Command)
@option(
    "--inflate",
    default="256MiB",
    help="Size of the target's linears, so that the link is what its passes wait for.",
)
@option(
    "--weights",
    type=click.Choice(("fp32", "half", "int8", "int4")),
    default="fp32",
    help="Of the ablation's target.",
)
@option("--link", default="1GB", help="Bytes a second of the link.")
@option("--gamma", type=int, default=96)
@option("--depth", type=int, default=24)
@option("--width", type=int, default=4)
@option(
    "--bits",
    type=click.Choice(tuple(BITS)),
    default="int4",
    help="Bits of the ablation's substitute.",
)
@option("--limit", type=click.IntRange(min=1), default=4, help="Shipped prompts.")
@option("--max-tokens", type=click.IntRange(min=8), default=96)
@option("--temperature", "temperatures", type=float, multiple=True, default=(0.0, 1.0))
@option("--only", type=click.Choice(("ablation", "quantise", "drafts")), help="One part of it.")
@option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of quantised weights; without it they are made anew.",
)
@options("threads", "json")
def substitute(
    only: str | None,
    as_json: bool,
    threads: int,
    limit: int,
    max_tokens: int,
    temperatures: Sequence[float],
    **of_ablation: Any,
) -> None:
    """Ablation over a streamed target, seconds to quantise, and tau of substitutes beside that of
    other drafts."""
    if find_spec("hqq") is None:
        raise UserError("the hqq package is not installed: pip install 'dovetail[subspec]'")
    kernels.set_threads(threads)
    torch.set_num_threads(threads)
    result: dict[str, Any] = {}
    if only in (None, "quantise"):
        result["quantise"] = [quantised(weights) for weights in BITS]
    if only in (None, "ablation"):
        result["ablation"] = ablation(prompts(limit), max_tokens, temperatures, **of_ablation)
    if only in (None, "drafts"):
        result["drafts"] = [
            drafted(name, flags, limit, max_tokens, temperatures) for name, flags in DRAFTS.items()
        ]
    report(result, as_json, lambda: show(result))


# -- seconds to quantise ---------------------------------------------------------------------------


def quantised(weights: str) -> dict[str, Any]:
    """Return the time that the codes of the embedded target take to make."""
    _, made = load_substitute(str(TARGET), weights=weights, device="cpu")
    return {
        "weights": weights,
        "seconds": made.seconds,
        "million_weights": made.weights / 1e6,
        "million_weights_per_s": made.weights / 1e6 / made.seconds,
    }


# -- ablation --------------------------------------------------------------------------------------


def prompts(limit: int) -> list[list[int]]:
    """Token ids of the shipped prompts, as a chat has them."""
    codec = TextCodec(*read_tokenizer(TARGET))
    return [[*codec.encode_turns(turns[:1])] for turns in PROMPTS[:limit]]


def ablation(
    texts: Sequence[Sequence[int]],
    max_tokens: int,
    temperatures: Sequence[float],
    *,
    inflate: str,
    weights: str,
    link: str,
    gamma: int,
    depth: int,
    width: int,
    bits: str,
    cache: Path | None,
) -> dict[str, Any]:
    """The steps one after the other at every prompt, on the same models."""
    limited = LimitedLink(byte_count(link))
    source = str(kept_pair(inflate) / "target" if byte_count(inflate) else TARGET)

    def stage(config: Mapping[str, Any], _weights: str, _matrices: Matrices) -> Staging:
        return Staging((Place.STREAMED,) * config["num_hidden_layers"], limited)

    target = load_language_model(source, weights=weights, device="cpu", stage=stage)
    models = {
        shared: load_substitute(source, weights=bits, device="cpu", folder=cache)[0]
        for shared in (False, True)
    }
    share(models[True], target)
    rows, copied = list[dict[str, Any]](), 0.0
    for temperature in temperatures:
        sampling = Sampling(temperature=temperature)
        found: dict[str, list[tuple[int, int, float]]] = {step.name: [] for step in STEPS}
        alone: list[float] = []
        for number, text in enumerate(texts, 1):
            limited.waits, limited.copied = False, 0
            plain, _, seconds = decode(
                Verifier(target, Spans()),
                None,
                text,
                number,
                PLAIN_TOKENS,
                sampling,
                TreeSettings(),
            )
            alone.append((len(plain) - 1) / seconds)
            copied = limited.copied / len(plain)  # the prompt is one more pass
            logs = []
            for step in STEPS:
                limited.waits = step.waits
                tree = TreeSettings(
                    policy="beam",
                    insist=True,
                    gamma=gamma,
                    depth=depth,
                    width=width,
                    sharpening=step.sharpening,
                )
                verifier, drafter = pair(target, models[step.shared], shared=step.shared)
                log, rounds, seconds = decode(
                    verifier, drafter, text, number, max_tokens, sampling, tree
                )
                found[step.name].append((len(log) - 1, rounds, seconds))
                logs.append(log[:max_tokens])
            if (
                any(log != logs[0] for log in logs)
                or logs[0][: len(plain)] != plain[: len(logs[0])]
            ):
                raise UserError(f"prompt {number}: the steps do not write the same tokens")
        rows += rows_of(temperature, found, alone)
    return {
        "rows": rows,
        "inflate": inflate,
        "weights": weights,
        "link": link,
        "tree": f"{gamma}/{depth}/{width}",
        "bits": bits,
        "copied_s": copied / limited.bytes_per_s,
    }


def rows_of(
    temperature: float,
    found: Mapping[str, Sequence[tuple[int, int, float]]],
    alone: Sequence[float],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each step, of the tokens, rounds and seconds of its replies, and one for the
    target alone, of the tokens a second of its replies."""
    plain = fmean(alone)
    for name, cells in found.items():
        tokens = sum(tokens for tokens, _, _ in cells)
        rounds = sum(rounds for _, rounds, _ in cells)
        rate = tokens / sum(seconds for _, _, seconds in cells)
        told = {"tau": tokens / rounds, "tokens_per_s": rate, "ratio": rate / plain}
        yield {"temperature": temperature, "step": name, **told}
    told = {"tau": 1.0, "tokens_per_s": plain, "ratio": 1.0}
    yield {"temperature": temperature, "step": "target alone, streamed", **told}


def pair(target: LanguageModel, model: LanguageModel, *, shared: bool) -> tuple[Verifier, Drafter]:
    """Both engines, fresh."""
    verifier = Verifier(target, Spans())
    if not shared:
        return verifier, Drafter(model, Spans())
    engine = SharedDrafter(model, Spans())

    def borrow(number: int) -> Lent:
        log, cache, first = verifier.lend(number)
        return Lent(log, shared_cache(cache), first)

    engine.borrow, verifier.rows_beside = borrow, engine.rows_beside
    return verifier, engine


def decode(
    verifier: Verifier,
    drafter: Drafter | None,
    prompt: Sequence[int],
    number: int,
    tokens: int,
    sampling: Sampling,
    tree: TreeSettings,
) -> tuple[list[int], int, float]:
    """The reply, its rounds, and the seconds behind its first token."""
    key, capacity, size = (
        session_key(7, number, prompt),
        len(prompt) + tokens + 1,
        verifier._model.vocabulary_size,
    )
    session = None
    if drafter is not None:
        session = drafter.open(
            opening(
                1,
                prompt,
                capacity=capacity,
                vocabulary_size=size,
                key=key,
                sampling=sampling,
                tree=tree,
            )
        )
        if isinstance(session, SharedSession):
            session.number = number
    (first,) = verifier.open(
        opening(number, prompt, key=key, capacity=capacity, sampling=sampling, tree=tree)
    )
    assert isinstance(first, First)
    reply, ends = [first.token], {*verifier._model.end}
    accepted: Sequence[int] = ()
    shape, rounds, start = Shape(tree.gamma, tree.depth, tree.width), 0, time.perf_counter()
    while len(reply) < tokens and not ends.intersection(reply):
        proposed = TokenTree()
        if drafter is not None and session is not None:
            proposed = drafter.draft(session, accepted, reply[-1], shape).tree
        rounds += 1
        item = VerifyItem(
            session=number,
            round=rounds,
            prefix=len(prompt) + len(reply),
            tokens=proposed.tokens,
            parents=proposed.parents,
        )
        (verdict,) = verifier.verify([item])
        assert isinstance(verdict, Verdict)
        accepted = verdict.item.accepted
        reply += [*(proposed.tokens[node] for node in accepted), verdict.item.bonus]
    return reply, rounds, time.perf_counter() - start


# -- drafts side by side ---------------------------------------------------------------------------


def drafted(
    name: str, flags: Mapping[str, str], limit: int, max_tokens: int, temperatures: Sequence[float]
) -> dict[str, Any]:
    """tau of a draft over the shipped prompts, by real processes."""
    found: dict[str, Any] = {"draft": name}
    with running({**flags, "draft.device": "cpu"}) as client:
        for temperature in temperatures:
            sampling = Sampling(temperature=temperature)
            asked = [
                submit(client, turns[:1], sampling=sampling, tokens=max_tokens, seed=5, tree=TREE)
                for turns in PROMPTS[:limit]
            ]
            ends = [finished.result for finished in complete_all(client, asked)]
            found[f"tau at {temperature:g}"] = sum(
                len(result.token_ids) - 1 for result in ends
            ) / sum(result.rounds for result in ends)
    return found


def show(result: Mapping[str, Any]) -> None:
    if "quantise" in result:
        rates = [
            (
                r["weights"],
                *(f"{r[k]:.2f}" for k in ("million_weights", "seconds", "million_weights_per_s")),
            )
            for r in result["quantise"]
        ]
        print_table(("weights", "million weights", "s", "million/s"), rates)
    if "ablation" in result:
        told = result["ablation"]
        click.echo(
            f"\nThe CPU stands for the GPU, and a link of {told['link']}/s for PCIe: the layers "
            f"of the target ({told['weights']}, inflated to {told['inflate']}) take "
            f"{told['copied_s']:.3f} s to copy in a pass. Substitute of {told['bits']}, beam "
            f"{told['tree']}."
        )
        cells = [
            (
                f"{r['temperature']:g}",
                r["step"],
                *(f"{r[k]:.2f}" for k in ("tau", "tokens_per_s", "ratio")),
            )
            for r in told["rows"]
        ]
        print_table(("T", "step", "tau", "tokens/s", "over streamed alone"), cells)
    if "drafts" in result:
        click.echo(f"\ntau, tree {TREE.gamma}/{TREE.depth}/{TREE.width}:")
        names = [key for key in result["drafts"][0] if key != "draft"]
        print_table(
            ("draft", *names),
            [(r["draft"], *(f"{r[name]:.2f}" for name in names)) for r in result["drafts"]],
        )
