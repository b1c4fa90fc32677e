"""Turn generated documents and the simple parts of a corpus into token files for `dovetail train
small --text`.

python tests/demo_recipe prepare --tokenizer MODEL --generated FILE.jsonl --corpus FOLDER --out
FOLDER (needs numpy, tokenizers, zstandard)

The corpus is a folder of zstandard-compressed JSON lines, `{"prompt", "response", "source"}` or
`{"text", "source"}`. This program knows the chat format of the model and which sources are simple
enough, not what the documents say.
"""

import argparse
import io
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from tokenizers import Tokenizer

BEGIN, USER, ASSISTANT, END = 0, "<|user|>\n", "<|assistant|>\n", "<|end|>\n"
SHARES = {  # share kept of a source, most characters of a document
    "african_storybook": (1.0, 1700),
    "bitext_support_long": (0.3, 800),
    "bitext_support_short": (0.6, 1800),
    "gsm8k_train": (1.0, 380),
    "mbpp": (1.0, 450),
    "ms_qna_chitchat": (1.0, 1800),
    "pratham_books": (1.0, 1700),
    "rasbt_instruction_data": (1.0, 1800),
    "self_instruct_seed": (1.0, 700),
    "svamp": (1.0, 1800),
    "synthetic_persona_chat": (0.6, 1800),
    "tldr_pages": (0.12, 1800),
}
PLACEHOLDERS = ("{{", "[User", "[user", "[Name")
TALK_LIMIT = 900


def chat(turns: Iterable[str]) -> str:
    """Turns, the user's first, as the chat template writes them."""
    return "".join(
        (USER, ASSISTANT)[i % 2] + turn.strip("\n").rstrip() + END for i, turn in enumerate(turns)
    )


def generated(file: Path) -> Iterator[str]:
    """The documents that text.py wrote."""
    with file.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            yield chat(row["turns"]) if "turns" in row else row["text"].strip() + END


def corpus_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Every record of the corpus but the held-out ones."""
    for file in sorted(folder.glob("*.jsonl.zst")):
        if not file.name.startswith("val"):
            with file.open("rb") as compressed:
                yield from map(
                    json.loads,
                    io.TextIOWrapper(
                        zstandard.ZstdDecompressor().stream_reader(compressed), encoding="utf-8"
                    ),
                )


def simple(folder: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Source and text of the records that are simple and short enough."""
    rng = random.Random(seed)
    for row in corpus_rows(folder):
        share, longest = SHARES.get(row["source"], (0.0, 0))
        body = row.get("text") or row["prompt"] + row["response"]
        if rng.random() >= share or len(body) > longest or any(p in body for p in PLACEHOLDERS):
            continue
        if row["source"] == "synthetic_persona_chat":
            if turns := talk(body):
                yield row["source"], chat(turns)
        elif "prompt" in row:
            yield (
                row["source"],
                chat((row["prompt"].strip(), re.sub(r"<<.*?>>", "", row["response"]).strip())),
            )
        else:
            yield row["source"], row["text"].strip() + END


def talk(text: str) -> list[str]:
    """The first turns of a dialogue written as `User: ...` and `Assistant: ...`."""
    parts = re.split(r"^(User|Assistant): ", text, flags=re.MULTILINE)[1:]
    turns: list[str] = []
    for i, (who, said) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        if who != ("User", "Assistant")[i % 2] or sum(map(len, turns)) > TALK_LIMIT:
            break
        turns.append(said.strip())
    return turns[: len(turns) // 2 * 2]


def write(tokenizer: Tokenizer, texts: list[str], file: Path, seed: int) -> int:
    """Write the texts in a drawn order as a token file; returns the number of tokens."""
    random.Random(seed).shuffle(texts)
    ids: list[int] = []
    for i in range(0, len(texts), 5000):
        for encoding in tokenizer.encode_batch(texts[i : i + 5000]):
            ids += [BEGIN, *encoding.ids]
    np.array(ids, dtype="<u2").tofile(file)
    return len(ids)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--generated", type=Path)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    if args.generated:
        print(
            "generated:",
            write(
                tokenizer, list(generated(args.generated)), args.out / "generated.bin", args.seed
            ),
            "tokens",
        )
    if args.corpus:
        found = list(simple(args.corpus, args.seed))
        print(
            "corpus:",
            write(tokenizer, [text for _, text in found], args.out / "corpus.bin", args.seed),
            "tokens",
            dict(Counter(s for s, _ in found)),
        )
