"""Write generated documents: python tests/demo_recipe text --documents N --seed S --out FILE.jsonl.

A document is {"turns": [user, assistant, ...], "kind": ...} or {"text": ..., "kind": ...}. It knows
what share each kind of text has, not how it is tokenized. `dovetail features --data FILE.jsonl
--regenerate --out FEATURES` has the embedded target answer the questions itself and stores what its
draft heads are trained on.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from demo_recipe import explain, facts, functions, rewrite, stories, sums, talk

Document = dict[str, Any]


def pair(
    kind: str, make: Callable[[random.Random], tuple[str, str]]
) -> Callable[[random.Random], Document]:
    """A document of one turn each."""

    def document(rng: random.Random) -> Document:
        prompt, answer = make(rng)
        return {
            "turns": [varied(prompt, rng) if "\n" not in prompt else prompt, answer],
            "kind": kind,
        }

    return document


def varied(prompt: str, rng: random.Random) -> str:
    """Now and then a prompt with something around it that changes nothing."""
    if rng.random() < 0.8:
        return prompt
    before = rng.choice(
        (
            "",
            "",
            "Hello! ",
            "I have a question. ",
            "Quick question: ",
            "Please help me. ",
            "Please: ",
            "One more thing: ",
        )
    )
    after = rng.choice(("", "", " Thank you!", " Thanks.", " Please be short.", " Please."))
    return before + prompt + after


KINDS: dict[str, tuple[float, Callable[[random.Random], Document]]] = {
    "story": (33, pair("story", stories.story)),
    "continued": (3, pair("story", stories.continued)),
    "plain": (2, lambda rng: {"text": stories.plain(rng), "kind": "plain"}),
    "math": (19, pair("math", sums.problem)),
    "question": (26, pair("question", facts.fact)),
    "explanation": (6, pair("explanation", explain.why)),
    "advice": (8, pair("advice", explain.advice)),
    "code": (8, pair("code", functions.function)),
    "rewrite": (12, pair("rewrite", rewrite.rewriting)),
    "chat": (8, lambda rng: {"turns": talk.turns(rng), "kind": "chat"}),
}


def documents(count: int, seed: int) -> Iterator[Document]:
    """Yield that many documents, the same for the same seed."""
    rng = random.Random(seed)
    shares, makers = zip(*KINDS.values(), strict=True)
    for make in rng.choices(makers, shares, k=count):
        yield make(rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=60000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8") as file:
        for document in documents(args.documents, args.seed):
            file.write(json.dumps(document, ensure_ascii=False) + "\n")
