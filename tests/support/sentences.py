"""The form of an error for its reader: one sentence in plain words with a remedy."""

import re

CRYPTIC = re.compile(
    r"NoneType|has no attribute|Error\b|Exception|Traceback|must match|singleton|expanded "
    r"size|size of tensor|out of range|positional|keyword|"
    r"subscriptable|callable|unpack|<class|torch\.|Expected |\bself\b|__|errno|Errno|codec|\n"
)
"""Words of Python and torch, which say nothing to who has named a model or a file."""
REMEDY = re.compile(
    r"[;:,] .*\b(take|use|fetch|correct|choose|upgrade|save|convert|merge|remove|name|leave|write|free|raise|check|add|let|must be|a model is)\b"  # noqa: E501
)
LONGEST = 500


def check_sentence(text: str, *named: str) -> str:
    """An error names what it is about, in plain words and with a remedy; the text without what it
    names."""
    for name in named:
        assert name in text, text
        text = text.replace(name, "")
    assert not CRYPTIC.search(text), text
    assert REMEDY.search(text), text
    assert len(text) < LONGEST, text
    return text
