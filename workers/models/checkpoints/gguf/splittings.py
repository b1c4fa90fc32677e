"""Pre-tokenizers: they split a text into words before byte pairs are merged. Their names are those
of `tokenizer.ggml.pre` in llama.cpp (`llama-vocab.cpp`). Each is a list of expressions that split
what the previous ones left; text between matches is a word, too.

Where llama.cpp's words differ from those of the family's tokenizer.json, the latter are followed:
llama.cpp does not normalize text to NFC, does not recognize non-ASCII capitals (Kimi, Youtu: any)
in words like GPT-4o's, and joins text with the first digits after it (Trinity, Tiny Aya)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s+(?!\S)|\s+"
_SPACES = rf"\s*[\r\n]+|{_BLANKS}"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_BLANKS}"
_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_HAN = "[一-龥\u3040-ゟ゠-ヿ]+"
_CLAUSES = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LINES = r"[^\n]+|[\n]+"
_LATIN = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ"
    "\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_EASTERN = (
    "[一-\u9fff㐀-\u4dbf\u8c48-\ufaff\u3040-ゟ゠-ヿ･-ﾟ\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0effក-\u17ff"
    "က-႟ꩠ-ꩿ\ua9e0-\ua9ff가-\ud7afᄀ-ᇿ]+"
)


def _words(
    digits: str = r"\p{N}{1,3}",
    *,
    endings: str = f"{_ENDINGS}|",
    letters: str = r"\p{L}+",
    marks: str = r"[^\s\p{L}\p{N}]+[\r\n]*",
    spaces: str = _SPACES,
) -> str:
    """The expression of Llama 3 and similar models, which differ in how many digits are grouped."""
    return rf"{endings}[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?{marks}|{spaces}"


def _cased(
    digits: str = r"\p{N}{1,3}",
    ending: str = f"{_ENDINGS}?",
    *,
    apart: str = "",
    lines: str = r"[\r\n/]*",
) -> str:
    """The expression of GPT-4o and similar models, in which a capital begins a word. `apart`: a
    script whose letters are not part of such words."""
    upper, lower = (
        f"{letters[:-1]}&&[^{apart}]]" if apart else letters for letters in (_UPPER, _LOWER)
    )
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}|{digits}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+{lines}|{_SPACES}"
    )


def _marked(spaces: str = rf"[\r\n]*|{_SPACES}") -> str:
    """The last expression of DeepSeek V3 and similar models, where punctuation begins a word."""
    return (
        rf"{_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+|"
        rf" ?[\p{{P}}\p{{S}}]+{spaces}"
    )


@dataclass(frozen=True)
class Splitting:
    """A pre-tokenizer: how a text is split into words before tokenization."""

    expressions: Sequence[str]
    ignore_merges: bool = False  # a word that is a token is not split
    composed: bool = False  # the text is normalized to NFC first
    begins: bool = False  # by default a text begins with the begin token


DEFAULT = Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
"""llama.cpp's, for a file that names none."""
_PLAIN, _COMPOSED = Splitting((_GPT2,)), Splitting((_GPT2,), composed=True)
_DIGITS = Splitting((r"\p{N}", _GPT2))
_CL100K, _QWEN2 = Splitting((_words(),)), Splitting((_words(r"\p{N}"),))
_GLM4 = replace(_CL100K, ignore_merges=True)
_LLAMA3 = replace(_GLM4, begins=True)
_DEEPSEEK3 = Splitting((r"\p{N}{1,3}", _HAN, _marked()))
_GPT4O = Splitting((_cased(),))
_COHERE = Splitting((r"\d{1,3}(?=(?:\d{3})*\b)", _cased()), composed=True)
_ROWS = "".join(rf"\s{{{1 << power}}}(?!\S)|" for power in range(9, 1, -1))
SPLITTINGS: Mapping[str, Splitting] = {
    "default": DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "jais", "trillion", "granite-docling", "mellum"), _PLAIN),
    **dict.fromkeys(("gigachat", "a.x-4.0", "exaone4", "modern-bert", "roberta-bpe"), _PLAIN),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v1-en"), _PLAIN),
    **dict.fromkeys(("olmo", "mpt"), _COMPOSED),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS),
    "command-r": replace(_DIGITS, composed=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2", "jina-v5-nano"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("glm4", "glm5"), _GLM4),
    "minicpm5": Splitting((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
    "jais-2": Splitting((_words(spaces=rf"\s*[\r\n]+|{_ROWS}\s{{1,2}}(?!\S)|\s{{1}}"),)),
    **dict.fromkeys(("qwen2", "f2llmv2"), replace(_QWEN2, composed=True)),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open"), _QWEN2),
    **dict.fromkeys(("megrez", "kormo", "grok-2", "bailingmoe", "bailingmoe2"), _QWEN2),
    "llada-moe": _QWEN2,
    "qwen35": Splitting(
        (_words(r"\p{N}", letters=r"[\p{L}\p{M}]+", marks=r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),),
        composed=True,
    ),
    "ufakzeka": Splitting((_words(r"\p{N}", endings=""),)),
    "seed-coder": Splitting((_words(r"\p{N}", marks=r"[^\s\p{L}\p{N}\r\n]+"),)),
    "laguna": Splitting((_LINES, *_QWEN2.expressions)),
    "exaone-moe": Splitting(
        (
            _words(
                r"\p{N}",
                letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                marks=r"[^\s\p{L}\p{N}]+[\r\n/]?",
            ),
        )
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "spark2_5": Splitting((r"\p{N}{1,3}", _HAN, _marked(rf"|[\r\n]|{_BLANKS}"), r"\p{N}")),
    "afmoe": Splitting((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _EASTERN, _marked())),
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
    "superbpe": Splitting((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), Splitting((_CLAUSES,))),
    "viking": Splitting((_CLAUSES, r"\p{N}")),
    "chameleon": Splitting(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        begins=True,
    ),
    "tekken": Splitting((_cased(r"\p{N}", ""),), ignore_merges=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "granite-embed-multi-97m": replace(_GPT4O, ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _COHERE),
    "kimi-k2": Splitting((r"\p{Han}+|" + _cased(apart=r"\p{Han}", lines=r"[\r\n]*"),)),
    "youtu": Splitting(
        (
            "[가-힣ㄱ-ㆎ]+|[！…\u201c\u201d\u2018\u2019—：；，\u3001-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _HAN,
            _cased(r"\p{N}"),
        ),
        ignore_merges=True,
    ),
}
LETTERS = {"gemma4": True, "granite-embed-multi-311m": True, "sarvam-moe": False}
"""Names with vocabularies of Gemma 4's kind -> whether texts begin with the begin token."""
ENCODERS = ("mmbert", "whitespace", "jina-v2-es", "jina-v2-de", "jina-v2-code")
"""Names of encoders whose tokens also match a space before them, or that have no merges."""
