"""The tokenizer.json of a GGUF file's vocabulary: `gpt2`, byte-level with merges; `llama`,
SentencePiece with scores; `gemma4`, a mix. Byte-level ones split a text into words by
`tokenizer.ggml.pre` (`splittings.py`). Other kinds, unknown pre-tokenizers and keys that change a
text in unsupported ways are refused, since wrong tokens would go unnoticed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.gguf.files import Model
from dovetail.workers.models.checkpoints.gguf.splittings import (
    DEFAULT,
    ENCODERS,
    LETTERS,
    SPLITTINGS,
)

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER = 1, 2, 3, 4  # types of tokens that matter here
SPACE = "▁"
INSTEAD = "use the model's folder of safetensors, or a file with a known tokenizer"
ENDS = ("eos", "eot", "eom")
PIECES = {"bos": 1, "eos": 2, "unknown": 0}  # ids that SentencePiece's files need not state
CHANGING = {
    "add_eos_token": "it ends every text with an end token",
    "add_sep_token": "it ends every text with a separator",
    "remove_extra_whitespaces": "it drops spaces",
    "normalizer.lowercase": "it lowercases the text",
    "normalizer.strip_accents": "it strips accents",
}
"""Keys that, if true, change a text or its tokens in a way that is not supported here."""
FILLED = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Keys of fill-in-the-middle tokens that end a reply -> their control tokens' texts."""
ENDING = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"),
        *("<|endoftext|>", "<|eom_id|>", "<EOT>", "<|end_of_text|>", "<|flush|>", "<|calls|>"),
        *("<eos>", "<turn|>", "<｜end▁of▁sentence｜>", "</s>", "_<EOT>", "[EOT]", "[EOS]"),
        *("<end_of_utterance>", "<|tool_response>", "[e~["),
    )
)
"""Control tokens that end a reply. llama.cpp checks only the text, but Gemma's </s> is an HTML
tag."""
HARMONY = [
    {call, other} for call in ("<|call|>", "<|calls|>") for other in ("<|return|>", "<|flush|>")
]
"""If a vocabulary has both tokens, <|end|> ends a message and not the reply."""
NORMAL_BESIDE = "<|tool_response>"  # where it ends replies, </s> is an ordinary token
STRIPPED = ("phi-3", "phi3")  # names of models whose added tokens match the space behind them
UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # added tokens of `STRIPPED` that do not


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file, and their attributes."""

    content: Mapping[str, Any]  # tokenizer.json
    begin: int | None
    ends: Sequence[int]


class _Facts:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.tokens = self._list("tokens", required=True)
        self.kind = str(self.get("model", ""))
        kinds = self.get("token_type")
        self.types = self._numbers("token_type", kinds, "iu", 1)

    def get(self, name: str, default: Any = None) -> Any:
        return self.model.facts.get(PREFIX + name, default)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refusal(f"{PREFIX}{name} is {str(value)[:50]}, not true or false")
        return value

    def id(self, name: str) -> int | None:
        usual = PIECES.get(name) if self.kind == "llama" else None
        value = self.get(f"{name}_token_id", usual)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refusal(f"{PREFIX}{name}_token_id is {str(value)[:50]}, no number")
        return next((one for one in (value, usual) if one in range(len(self.tokens))), None)

    def merges(self) -> list[tuple[str, str]]:
        """Pairs of tokens, the first one to be merged first."""
        index, found = set(self.tokens), []
        for merge in self._list("merges", required=True):
            place = merge.find(" ", 1)
            if place < 0:
                raise self.refusal(f"merge {merge[:50]!r} is no pair of tokens")
            left, right = merge[:place], merge[place + 1 :]
            if left not in index or right not in index or left + right not in index:
                why = f"it merges {left[:30]!r} and {right[:30]!r}, which are no tokens"
                raise self.refusal(why)
            found.append((left, right))
        return found

    def scores(self) -> np.ndarray:
        return self._numbers("scores", self.get("scores"), "fiu", 0)

    def refusal(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.model.file}: its tokenizer cannot be read: {why}; {INSTEAD}")

    def _list(self, name: str, *, required: bool) -> list[str]:
        value = self.get(name)
        if not isinstance(value, list) or (required and not value):
            raise self.refusal(f"{PREFIX}{name} is no list of texts")
        return value

    def _numbers(self, name: str, value: Any, kinds: str, default: int) -> np.ndarray:
        if value is None:
            return np.full(len(self.tokens), default)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            raise self.refusal(f"{PREFIX}{name} is no list of numbers")
        if len(value) != len(self.tokens):
            counts = f"{len(value)} items for {len(self.tokens)} tokens"
            raise self.refusal(f"{PREFIX}{name} has {counts}")
        return value


def read_vocabulary(model: Model) -> Vocabulary:
    """Return the tokenizer of a model; `CheckpointError` for one that is not known here."""
    facts = _Facts(model)
    if facts.kind == "gpt2" and str(facts.get("pre")) in LETTERS:
        facts.kind = "gemma4"
    makers = {"gpt2": _byte_level, "llama": _sentence_pieces, "gemma4": _raw_pairs}
    if facts.kind not in makers:
        raise facts.refusal(f"{PREFIX}model is {facts.kind[:50]!r}, not one of {', '.join(makers)}")
    if len(set(facts.tokens)) != len(facts.tokens):
        raise facts.refusal("two of its tokens have the same spelling")
    begin, ends = facts.id("bos"), _ends(facts)
    facts.types = _with_control(facts, ends)
    parts, begins = makers[facts.kind](facts)
    for name, why in CHANGING.items():
        if facts.flag(name, False):
            raise facts.refusal(f"{why} ({PREFIX}{name} is true)")
    if np.size(facts.get("precompiled_charsmap", ())):
        raise facts.refusal(f"it replaces characters ({PREFIX}precompiled_charsmap)")
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(facts),
        **parts,
    }
    always = facts.kind == "gemma4" and begins
    begun = facts.flag("add_bos_token", begins) or always
    content["post_processor"] = _template(facts.tokens, begin if begun else None)
    return Vocabulary(content, begin, ends)


def _byte_level(facts: _Facts) -> tuple[dict[str, Any], bool]:
    """GPT-2's kind: letters stand for bytes, and words come from an expression."""
    name = str(facts.get("pre", ""))
    if name and name not in SPLITTINGS:
        why = "which an encoder uses" if name in ENCODERS else "not known here"
        raise facts.refusal(f"{PREFIX}pre, the pre-tokenizer, is {name[:50]!r}, {why}")
    splitting = SPLITTINGS[name] if name else DEFAULT  # as in llama.cpp
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    splits = [_split(expression) for expression in splitting.expressions]
    return {
        "normalizer": {"type": "NFC"} if splitting.composed else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, {**byte_level, "use_regex": False}],
        },
        "decoder": {**byte_level, "use_regex": True},
        "model": _pairs_model(facts, facts.merges(), ignore_merges=splitting.ignore_merges),
    }, splitting.begins


def _sentence_pieces(facts: _Facts) -> tuple[dict[str, Any], bool]:
    """SentencePiece's kind: pieces with scores, a sign for a space, bytes for unknown letters."""
    prefixed = facts.flag("add_space_prefix", True)
    signs = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    begun = [{"type": "Prepend", "prepend": SPACE}, *signs] if prefixed else signs
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    spelt = [_spelt(token, kind) for token, kind in zip(facts.tokens, facts.types, strict=True)]
    return {
        "normalizer": {"type": "Sequence", "normalizers": begun},
        "pre_tokenizer": None,
        "decoder": _spaced_decoder(strip),
        "model": _pairs_model(
            facts, _merges_of(spelt, facts.scores(), facts.types), tokens=spelt, bytes_for_rest=True
        ),
    }, True


def _raw_pairs(facts: _Facts) -> tuple[dict[str, Any], bool]:
    """Gemma 4's kind: merges over letters, with a symbol for a space, and lines split off. If texts
    begin with the begin token, they do so for any `add_bos_token`."""
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": _split(r"[^\n]+|[\n]+"),
        "decoder": _spaced_decoder([]),
        "model": _pairs_model(facts, facts.merges(), bytes_for_rest=True),
    }, facts.get("model") == "gemma4" or LETTERS[facts.get("pre")]


def _pairs_model(
    facts: _Facts,
    merges: list[tuple[str, str]],
    *,
    tokens: Sequence[str] | None = None,
    ignore_merges: bool = False,
    bytes_for_rest: bool = False,
) -> dict[str, Any]:
    spelt = facts.tokens if tokens is None else tokens
    index = {token: place for place, token in enumerate(spelt)}
    unknown = facts.id("unknown")
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": spelt[unknown] if unknown is not None and bytes_for_rest else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": bytes_for_rest,
        "byte_fallback": bytes_for_rest,
        "ignore_merges": ignore_merges,
        "vocab": index,
        "merges": merges,
    }


def _merges_of(
    tokens: Sequence[str], scores: np.ndarray, kinds: np.ndarray
) -> list[tuple[str, str]]:
    """Return the pairs that make a piece, by descending score, then by ids, as SentencePiece."""
    index = {
        token: place
        for place, (token, kind) in enumerate(zip(tokens, kinds.tolist(), strict=True))
        if kind in (1, USER)
    }
    find, found = index.get, list[tuple[int, int]]()
    for place in sorted(index.values(), key=(-scores).tolist().__getitem__):
        token = tokens[place]
        found += sorted(
            [
                (one, two)
                for cut in range(1, len(token))
                if (one := find(token[:cut])) is not None and (two := find(token[cut:])) is not None
            ]
        )
    return [(tokens[left], tokens[right]) for left, right in found]


def _spelt(token: str, kind: int) -> str:
    """A piece in SentencePiece's spelling: files have spaces in user-defined ones."""
    return token.replace(" ", SPACE) if kind == USER else token


def _added(facts: _Facts) -> list[dict[str, Any]]:
    """Return tokens that are matched first: control tokens, and user-defined ones in normalised
    text. Phi-3's include the spaces after them, which llama.cpp decides by the model's name."""
    pieces, name = facts.kind == "llama", str(facts.model.facts.get("general.name", "")).lower()
    strips = any(own in name for own in STRIPPED)
    return [
        {
            "id": place,
            "content": _spelt(facts.tokens[place], kind) if pieces else facts.tokens[place],
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and facts.tokens[place] not in UNSTRIPPED,
            "normalized": pieces and kind == USER,
            "special": kind != USER,
        }
        for place, kind in enumerate(facts.types.tolist())
        if kind in (UNKNOWN, CONTROL, USER)
    ]


def _ends(facts: _Facts) -> list[int]:
    """Return the ids that end a reply, by the file's keys and by control tokens' texts."""
    named = [found for name in ENDS if (found := facts.id(name)) is not None]
    control = [(place, facts.tokens[place]) for place in np.flatnonzero(facts.types == CONTROL)]
    more = [int(place) for place, token in control if token in ENDING]
    for name, texts in FILLED.items():
        by_text = (int(place) for place, token in control if token in texts)
        place = found if (found := facts.id(name)) is not None else next(by_text, None)
        more += [] if place is None else [place]
    ends = list(dict.fromkeys((*named, *more)))
    texts_of = {facts.tokens[place] for place in ends}
    spared = {"<|end|>"} if any(texts_of >= tokens for tokens in HARMONY) else set()
    spared |= {"</s>"} if NORMAL_BESIDE in texts_of else set()
    return [place for place in ends if facts.tokens[place] not in spared]


def _with_control(facts: _Facts, ends: Sequence[int]) -> np.ndarray:
    """Return the types of tokens; normal tokens whose text ends a reply become control tokens."""
    texts = ENDING.union(*FILLED.values())
    types = facts.types.copy()
    types[[end for end in ends if types[end] == NORMAL and facts.tokens[end] in texts]] = CONTROL
    return types


def _split(expression: str) -> dict[str, Any]:
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def _spaced_decoder(strip: list[dict[str, Any]]) -> dict[str, Any]:
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    steps = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    return {"type": "Sequence", "decoders": steps}


def _template(tokens: Sequence[str], begin: int | None) -> dict[str, Any]:
    """How a text begins: with the begin token, or with nothing."""
    texts = [{"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB")]
    first: list[dict[str, Any]] = []
    named: dict[str, Any] = {}
    if begin is not None:
        token = tokens[begin]
        first = [{"SpecialToken": {"id": token, "type_id": 0}}]
        named = {token: {"id": token, "ids": [begin], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": [*first, texts[0]],
        "pair": [*first, *texts],
        "special_tokens": named,
    }
