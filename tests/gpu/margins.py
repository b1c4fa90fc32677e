"""Real processes with layers on a device, against a target on the CPU alone: the same tokens, or a
margin that says why not."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec

from dovetail.protocol.errors import DovetailError
from dovetail.protocol.messages import Finished
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from dovetail.runtime.session.comparison import NEAR_TIE, first_difference
from gpu.report import Report
from support.stacks import PROMPTS, complete_all, running, submit

TREE = TreeSettings(policy="dynamic", insist=True, gamma=15, depth=8, width=10)
TEMPERATURES = (0.0, 1.0)
TIES = {"fp32": NEAR_TIE, "half": NEAR_TIE, "int8": 0.3}
"""Margins that rounding decides. In int8 an input that is rounded the other way moves a logit by up
to 3 % of the largest, which is about 10."""
FEWER = ("split", "streamed", "unified")
"""The placements that are tried with weights of other types than fp32."""
SEED = 11


def placements(device: str, weights: str) -> dict[str, dict[str, str]]:
    """Flags by name; the embedded target has 8 layers."""
    draft, own = (
        {"draft.device": device, "target.weights": weights},
        {"target.device": device, "target.weights": weights},
    )
    found = {
        "draft": draft,
        "split": {**draft, "target.split.device": device, "target.split.layers": "4"},
        "resident": {**own, "draft.device": device, "target.resident": "8"},
        "streamed": {**own, "draft.device": device, "target.resident": "0"},
        "mixed": {**own, "draft.device": device, "target.resident": "3"},
        "prompts read": {**draft, "target.prefill": device},
    }
    if find_spec("hqq") is not None:
        found["unified"] = {
            **own,
            "draft.kind": "substitute",
            "draft.share": "true",
            "target.resident": "2",
        }
    return found


def run(report: Report, device: str, progress: Callable[[str], None]) -> None:
    """Every placement, greedily and sampled."""
    prompts, tokens = (1, 16) if report.quick else (4, 64)
    if find_spec("hqq") is None:
        report.note(
            "unified",
            "left out: the hqq package is not installed (pip install 'dovetail-llm[subspec]')",
        )
    for weights in ("fp32",) if report.quick else ("fp32", "half", "int8"):
        with running({"draft.device": "cpu", "target.weights": weights}) as client:
            expected = replies_of(client, prompts, tokens, None)
        for name, flags in placements(device, weights).items():
            if weights != "fp32" and name not in FEWER:
                continue
            progress(f"{weights}, {name}")
            try:
                with running(flags) as client:
                    found = replies_of(client, prompts, tokens, TREE)
            except DovetailError as error:
                report.check(f"{weights}, {name}", False, str(error).splitlines()[0])
                continue
            compare(report, f"{weights}, {name}", found, expected, TIES[weights])


Replies = Mapping[tuple[int, float], Finished]


def replies_of(
    client: Client, prompts: int, tokens: int, tree: TreeSettings | None, *, together: bool = False
) -> Replies:
    """Return the replies to the first prompts by their numbers and temperatures, one after the
    other or all `together`; without a tree those of the target alone."""

    def ask(number: int, temperature: float) -> int:
        return submit(
            client,
            PROMPTS[number][:1],
            sampling=Sampling(temperature=temperature),
            tokens=tokens,
            seed=SEED,
            tree=tree,
        )

    wanted = [(number, temperature) for number in range(prompts) for temperature in TEMPERATURES]
    if together:
        ends = complete_all(client, [ask(*one) for one in wanted])
        return dict(zip(wanted, ends, strict=True))
    return {one: client.complete(ask(*one)) for one in wanted}


def compare(report: Report, name: str, found: Replies, expected: Replies, tie: float) -> None:
    """Check that replies are the same, or part where the target's two best choices lie closer than
    `tie`."""
    widest, parted = 0.0, 0
    for (number, temperature), reply in found.items():
        if (difference := first_difference(reply, expected[number, temperature])) is not None:
            parted, widest = parted + 1, max(widest, difference.margin)
            report.note(
                f"{name}: prompt {number}, T = {temperature:g}",
                f"parts at token {difference.position}, margin {difference.margin:.1e}",
            )
    same = f"{len(found) - parted} of {len(found)} replies the same" + (
        f", widest margin {widest:.1e}" if parted else ""
    )
    report.check(name, widest < tie, same, f"the same, or margins < {tie:g}")
