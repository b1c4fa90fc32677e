"""The tokenizer.json of a GGUF file's vocabulary: `gpt2`, byte-level with merges; `llama`,
SentencePiece with scores; `gemma4`, a mix. Byte-level ones split a text into words by
`tokenizer.ggml.pre` (llama.cpp's `llama-vocab.cpp`), with expressions of the family's
tokenizer.json, applied in order. Other kinds and unknown ways of splitting are refused, since a
wrong expression gives wrong tokens silently."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.gguf.files import Model

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LATIN = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ"
    "\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


def _words(digits: str, *, endings: str = _ENDINGS) -> str:
    """The expression of Llama 3 and similar models, which differ in how many digits are grouped."""
    return (
        rf"{endings}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased(digits: str, ending: str) -> str:
    """The expression of GPT-4o and similar models, in which a capital begins a word."""
    return "|".join(
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{ending}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{ending}",
            digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            _SPACES,
        )
    )


@dataclass(frozen=True)
class Splitting:
    """A way of splitting a text into words before tokenization."""

    expressions: Sequence[str]
    ignore_merges: bool = False  # a word that is a token is not split
    composed: bool = False  # the text is brought into Unicode's composed form (NFC) first
    begins: bool = False  # by default a text begins with the begin token


_PLAIN = Splitting((_GPT2,))
_DIGITS = Splitting((r"\p{N}", _GPT2))
_LLAMA3 = Splitting((_words(r"\p{N}{1,3}"),), ignore_merges=True, begins=True)
_CL100K = Splitting((_words(r"\p{N}{1,3}"),))
_QWEN2 = Splitting((_words(r"\p{N}"),))
_QWEN35 = Splitting(
    (
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
        rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    )
)
_DEEPSEEK3 = Splitting(
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        rf"{_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+|"
        rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_GPT4O = Splitting((_cased(r"\p{N}{1,3}", rf"{_ENDINGS}?"),))
SPLITTINGS: Mapping[str, Splitting] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), _PLAIN),
    **dict.fromkeys(("granite-docling", "mellum", "gigachat", "a.x-4.0", "modern-bert"), _PLAIN),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), _DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    "glm4": Splitting(_CL100K.expressions, ignore_merges=True),
    "qwen2": Splitting(_QWEN2.expressions, composed=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "megrez"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "deepseek-llm": Splitting(
        (
            r"[\r\n]",
            rf"\s?[{_LATIN}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Splitting(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
    "falcon": Splitting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "tekken": Splitting((_cased(r"\p{N}", ""),), ignore_merges=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}


PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER = 1, 2, 3, 4  # types of tokens that matter here
SPACE = "▁"
INSTEAD = "use the model's folder of safetensors, or a file with a known tokenizer"
ENDS = ("eos", "eot", "eom")
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
        value = self.get(f"{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refusal(f"{PREFIX}{name}_token_id is {str(value)[:50]}, no number")
        return value if 0 <= value < len(self.tokens) else None

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
    makers = {"gpt2": _byte_level, "llama": _sentence_pieces, "gemma4": _raw_pairs}
    if facts.kind not in makers:
        raise facts.refusal(f"{PREFIX}model is {facts.kind[:50]!r}, not one of {', '.join(makers)}")
    if len(set(facts.tokens)) != len(facts.tokens):
        raise facts.refusal("two of its tokens have the same spelling")
    begin, ends = facts.id("bos"), _ends(facts)
    facts.types = _with_control(facts, ends)
    parts, begins = makers[facts.kind](facts)
    if facts.flag("add_eos_token", False):
        raise facts.refusal("it ends every text with an end token (add_eos_token)")
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(facts),
        **parts,
    }
    begun = facts.flag("add_bos_token", begins) or facts.kind == "gemma4"  # for any value
    content["post_processor"] = _template(facts.tokens, begin if begun else None)
    return Vocabulary(content, begin, ends)


def _byte_level(facts: _Facts) -> tuple[dict[str, Any], bool]:
    """GPT-2's kind: letters stand for bytes, and words come from an expression."""
    name = facts.get("pre")
    if not isinstance(name, str) or name not in SPLITTINGS:
        said = "is missing" if name is None else f"is {str(name)[:50]!r}"
        raise facts.refusal(f"{PREFIX}pre, the way of splitting words, {said} and not known here")
    splitting: Splitting = SPLITTINGS[name]
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
    if facts.flag("remove_extra_whitespaces", False):
        raise facts.refusal("it drops spaces of a text (remove_extra_whitespaces)")
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
    """Gemma 4's kind: merges over letters, with a sign for a space and lines apart."""
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": _split(r"[^\n]+|[\n]+"),
        "decoder": _spaced_decoder([]),
        "model": _pairs_model(facts, facts.merges(), bytes_for_rest=True),
    }, True


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
