"""How byte-level vocabularies split a text into words, by `tokenizer.ggml.pre` (llama.cpp's
`llama-vocab.cpp`). Unknown names are refused, since a wrong expression gives wrong tokens silently.
Expressions are those of the family's tokenizer.json, applied in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
