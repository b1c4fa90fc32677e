"""The embedded draft with other vocabularies, and the slow obvious way to read a log in them."""

import codecs
import json
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dovetail.launch.settings.models import DEMO_FOLDER

EMBEDDING = "model.embed_tokens.weight"
BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
SPECIAL = {"<|begin|>": "[open]", "<|end|>": "[stop]", "<|user|>": "[in]", "<|assistant|>": "[out]"}
"""The special tokens of the embedded models, and what they are called in the other vocabularies."""


def fewer_merges(folder: Path, share: float = 0.5) -> Path:
    """The embedded draft with this share of its merges and their tokens, the ids shuffled."""
    content = json.loads((DEMO_FOLDER / "draft" / "tokenizer.json").read_bytes())
    merges = [one if isinstance(one, list) else one.split() for one in content["model"]["merges"]]
    kept = merges[: int(share * len(merges))]
    gone = {"".join(one) for one in merges} - {"".join(one) for one in kept}
    rows = {t: i for t, i in content["model"]["vocab"].items() if t not in gone}
    content["model"]["merges"] = kept
    return _write(folder, content, rows)


def pieces_with_spaces(folder: Path, *, prepended: bool = False, bytes_too: bool = True) -> Path:
    """The embedded draft with a tokenizer like SentencePiece's: a sign for spaces, bytes for what
    has no token, merges across whole texts. `prepended`: a text begins with a space; `bytes_too`:
    there are tokens for bytes."""
    content = json.loads((DEMO_FOLDER / "draft" / "tokenizer.json").read_bytes())
    merges = [one if isinstance(one, list) else one.split() for one in content["model"]["merges"]]
    spelt, rows = {}, {}
    for token, index in content["model"]["vocab"].items():
        raw = bytes(BYTES[letter] for letter in token) if token not in SPECIAL else b""
        try:
            spelt[token] = raw.decode().replace(" ", "\u2581") or token
        except UnicodeDecodeError:
            if len(raw) > 1:
                continue
        if len(raw) == 1 and bytes_too:
            rows[f"<0x{raw[0]:02X}>"] = index
        if token in spelt:
            rows[spelt[token]] = index
    content["model"]["merges"] = [
        [spelt[one], spelt[other]]
        for one, other in merges
        if one in spelt and other in spelt and one + other in spelt
    ]
    content["model"] |= {"byte_fallback": bytes_too, "unk_token": None, "fuse_unk": True}
    sign = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    before = [{"type": "Prepend", "prepend": "\u2581"}] if prepended else []
    steps = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepended else []
    content |= {
        "pre_tokenizer": None,
        "post_processor": None,
        "normalizer": {"type": "Sequence", "normalizers": [*before, sign]},
        "decoder": {"type": "Sequence", "decoders": [*steps, *strip]},
    }
    return _write(folder, content, rows)


def _write(folder: Path, content: dict[str, Any], rows: Mapping[str, int]) -> Path:
    """Write the embedded draft with these tokens, each with its row of the embedding."""
    shutil.copytree(DEMO_FOLDER / "draft", folder)
    tokens = [*rows]
    random.Random(3).shuffle(tokens)
    ids = {SPECIAL.get(token, token): index for index, token in enumerate(tokens)}
    content["model"]["vocab"] = ids
    for one in content["added_tokens"]:
        one["content"] = SPECIAL[one["content"]]
        one["id"] = ids[one["content"]]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    weights = load_file(folder / "model.safetensors")
    weights[EMBEDDING] = weights[EMBEDDING][[rows[token] for token in tokens]].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    named = {"bos_token_id": "[open]", "eos_token_id": "[stop]", "pad_token_id": "[stop]"}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        config = json.loads((folder / name).read_bytes())
        config |= {key: ids[token] for key, token in named.items() if key in config}
        config |= {key: SPECIAL[one] for key, one in config.items() if str(one) in SPECIAL}
        if "vocab_size" in config:
            config["vocab_size"] = len(ids)
        (folder / name).write_text(json.dumps(config))
    template = (folder / "chat_template.jinja").read_text()
    for token, other in SPECIAL.items():
        template = template.replace(token, other)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@cache
def tokens_of(folder: Path) -> tuple[Tokenizer, dict[int, bytes], dict[str, int]]:
    """The tokenizer, the bytes of its ordinary tokens, and its special ones."""
    file = folder / "tokenizer.json"
    content, tokenizer = json.loads(file.read_bytes()), Tokenizer.from_file(str(file))
    special = {one["content"]: one["id"] for one in content["added_tokens"]}
    pieces = {}
    for token, index in tokenizer.get_vocab().items():
        if token in special:
            continue
        if content["decoder"]["type"] == "ByteLevel":
            pieces[index] = bytes(BYTES[letter] for letter in token)
        elif re.fullmatch("<0x..>", token):
            pieces[index] = bytes([int(token[3:5], 16)])
        else:
            pieces[index] = token.replace("\u2581", " ").encode()
    return tokenizer, pieces, special


def read_from_scratch(
    log: Sequence[int], target: Path, draft: Path, roles: Mapping[str, str]
) -> list[int]:
    """A target's log in the tokens of a draft. `roles`: special tokens of both that correspond."""
    tokenizer, pieces, special = tokens_of(draft)
    _, theirs, named = tokens_of(target)
    roles_by_id = {named[one]: special[other] for one, other in roles.items()}
    found, text, rest = list[int](), "", b""

    def read(run: bytes, *, final: bool) -> None:
        nonlocal text, rest
        text, used = codecs.utf_8_decode(run, "replace", final)
        rest = run[used:]
        found.extend(tokenizer.encode(text, add_special_tokens=False).ids)

    run = b""
    for token in log:
        run += theirs.get(token, b"")
        if token in roles_by_id:
            read(run, final=True)
            found.append(roles_by_id[token])
            run = b""
    read(run, final=False)
    single = {piece: index for index, piece in pieces.items() if len(piece) == 1}
    return [*found, *(single[bytes([byte])] for byte in rest)]


def target_of(target: Path, draft: Path, roles: Mapping[str, str]) -> dict[int, int]:
    """The draft's token -> the target's token that it stands for."""
    _, pieces, special = tokens_of(draft)
    _, theirs, named = tokens_of(target)
    letters = {f"<0x{byte:02X}>" for byte in range(256)}

    def of_piece(own: Mapping[int, bytes], tokenizer: Tokenizer) -> dict[bytes, int]:
        plain = sorted(own, key=lambda one: tokenizer.id_to_token(one) not in letters)
        return {own[index]: index for index in plain}

    mine, its = of_piece(pieces, tokens_of(draft)[0]), of_piece(theirs, tokens_of(target)[0])
    same = {index: its[piece] for piece, index in mine.items() if piece in its}
    return {special[other]: named[one] for one, other in roles.items()} | same
