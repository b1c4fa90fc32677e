"""The vocabulary, token ids and spellings, that a draft and its target must share. Reads
tokenizer.json with the standard library only."""

import hashlib
import json
import re
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from operator import le, lt
from typing import Any

from dovetail.protocol.errors import CheckpointError

HEAD = struct.Struct("<III")
"""Header of a packed table: bytes of its description, number of tokens, bytes of spellings."""
LARGEST_ID = (1 << 32) - 1
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_letters() -> Mapping[str, int]:
    """Return GPT-2's letter for each byte: itself if printable, else one from U+0100 on."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in themselves]
    return {
        **{chr(byte): byte for byte in themselves},
        **{chr(256 + place): byte for place, byte in enumerate(others)},
    }


BYTE_OF_LETTER = _byte_letters()


BYTES_OF_TOKENS = frozenset(
    ("ByteLevel", "ByteFallback", "Replace", "Metaspace", "WordPiece", "Fuse", "Strip")
)
"""Decoder types for which a token's bytes within a text do not depend on its neighbours (`Strip`
only changes the ends of a text)."""


class TokenTable:
    """The ids and spellings of a vocabulary, its special tokens and its decoder: everything needed
    for detokenizing. It takes about ten bytes per token and is cheap to unpack."""

    def __init__(
        self, about: Mapping[str, Any], ids: "array[int]", ends: "array[int]", spelt: bytes
    ) -> None:
        """`about`: digest, special and added (ids) and decoder (as in tokenizer.json). `ids`:
        ascending. `ends`: where each spelling ends in `spelt`, which is UTF-8."""
        self._about, self._ids, self._ends, self._spelt = about, ids, ends, spelt

    @classmethod
    def read(cls, tokenizer: bytes) -> "TokenTable":
        """Return the table of a tokenizer.json; `CheckpointError` if it holds no vocabulary."""
        return cls.described(_parsed(tokenizer))

    @classmethod
    def described(cls, content: Mapping[str, Any]) -> "TokenTable":
        """Return the table of the content of a tokenizer.json."""
        return cls.of(*_vocabulary_of(content), content.get("decoder"))

    @classmethod
    def of(
        cls,
        vocabulary: Mapping[int, str],
        special: Sequence[int] = (),
        added: Sequence[int] = (),
        decoder: Any = None,
    ) -> "TokenTable":
        """Return the table of these tokens. `added`: those of a text that no merges lead to."""
        ids, ends, spelt = array("I", sorted(vocabulary)), array("I"), bytearray()
        for index in ids:
            spelt += vocabulary[index].encode("utf-8", "surrogatepass")
            ends.append(len(spelt))
        digest = vocabulary_digest(vocabulary)
        about = {
            "digest": digest,
            "special": sorted(special),
            "added": sorted(added),
            "decoder": decoder,
        }
        return cls(about, ids, ends, bytes(spelt))

    @classmethod
    def unpacked(cls, content: bytes) -> "TokenTable":
        """Read a table written by `packed`; `CheckpointError` for anything else."""
        try:
            described, tokens, spelt = HEAD.unpack_from(content)
            start = HEAD.size + described
            about = json.loads(bytes(content[HEAD.size : start]))
            ids, ends = array("I"), array("I")
            ids.frombytes(content[start : start + 4 * tokens])
            ends.frombytes(content[start + 4 * tokens : start + 8 * tokens])
            rest = bytes(content[start + 8 * tokens :])
            if len(rest) != spelt or len(ends) != tokens:
                raise ValueError("its size disagrees with its header")
            named = {*about["special"], *about.get("added", ())}
            if not isinstance(about["digest"], str) or not named <= {*ids}:
                raise ValueError("it has no digest, or named tokens outside of its vocabulary")
            rest.decode("utf-8", "surrogatepass")
            within = any(rest[end] & 0xC0 == 0x80 for end in ends if end < spelt)
            ordered = all(map(lt, ids, ids[1:])) and all(map(le, ends, ends[1:]))
            if within or not ordered or (ends[-1] if ends else 0) != spelt:
                raise ValueError("its tokens are not in order")
        except (struct.error, ValueError, TypeError, LookupError, RecursionError) as error:
            raise CheckpointError(f"the token table cannot be read: {error}") from None
        return cls(about, ids, ends, rest)

    @cached_property
    def packed(self) -> bytes:
        """Return the table as bytes, in little endian."""
        about = json.dumps(self._about).encode()
        head = HEAD.pack(len(about), len(self._ids), len(self._spelt))
        return b"".join((head, about, self._ids.tobytes(), self._ends.tobytes(), self._spelt))

    @property
    def digest(self) -> str:
        """Return the `vocabulary_digest`."""
        return str(self._about["digest"])

    @property
    def decoder(self) -> Any:
        """Return the decoder as in tokenizer.json; None if tokens are joined by spaces."""
        return self._about.get("decoder")

    @cached_property
    def special(self) -> Mapping[str, int]:
        """Return the special tokens, which are not part of a text, and their ids."""
        return self._named("special")

    @cached_property
    def added(self) -> Mapping[str, int]:
        """Return the added tokens that are part of a text, such as `<tool_call>`, and their ids."""
        return self._named("added")

    def _named(self, which: str) -> Mapping[str, int]:
        ids = (int(index) for index in self._about.get(which, ()))
        return {one: index for index in ids if (one := self.spelling(index)) is not None}

    @cached_property
    def longest(self) -> int:
        """Return the length of the longest spelling in bytes, at least 1."""
        pairs = pairwise((0, *self._ends))
        return max((end - start for start, end in pairs), default=1) or 1

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def spelling(self, token: int) -> str | None:
        """Return the spelling of a token; None for an unknown id."""
        place = bisect_left(self._ids, token)
        if place == len(self._ids) or self._ids[place] != token:
            return None
        start = self._ends[place - 1] if place else 0
        return self._spelt[start : self._ends[place]].decode("utf-8", "surrogatepass")

    def pieces(self) -> dict[int, bytes]:
        """Return the bytes of each token within a text, by id; special tokens have none. Raises
        `CheckpointError` for a decoder for which they depend on other tokens."""
        named = self.decoder or {"type": "WordPiece", "prefix": ""}
        try:
            steps = named["decoders"] if named["type"] == "Sequence" else [named]
            kinds = {step["type"]: step for step in steps}
            spaces = [
                (step["pattern"]["String"], step["content"])
                if step["type"] == "Replace"
                else (step["replacement"], " ")
                for step in steps
                if step["type"] in ("Replace", "Metaspace")
            ]
            prefix = kinds["WordPiece"]["prefix"] if "WordPiece" in kinds else None
        except (LookupError, TypeError) as error:
            raise CheckpointError(f"its decoder is not supported ({error!r})") from None
        if unread := kinds.keys() - BYTES_OF_TOKENS:
            raise CheckpointError(f"its decoder {min(unread)} is not supported")
        special = {*self.special.values()}
        found = {}
        for token in self:
            spelt = self.spelling(token)
            if token in special or not spelt:
                continue
            if "ByteLevel" in kinds and all(letter in BYTE_OF_LETTER for letter in spelt):
                found[token] = bytes(map(BYTE_OF_LETTER.__getitem__, spelt))
            elif "ByteFallback" in kinds and (byte := BYTE_TOKEN.fullmatch(spelt)):
                found[token] = bytes([int(byte[1], 16)])
            else:
                for sign, space in spaces:
                    spelt = spelt.replace(sign, space)
                if prefix is not None:
                    word = not prefix or not spelt.startswith(prefix)
                    spelt = f" {spelt}" if word else spelt[len(prefix) :]
                found[token] = spelt.encode("utf-8", "surrogatepass")
        return found

    def against(self, draft: "TokenTable", draft_name: str, own_name: str) -> str:
        """Return why a draft that registers with that table cannot draft for this model; empty if
        it can."""
        if draft.digest == self.digest:
            return ""
        return (
            f"the draft {draft_name} does not share the vocabulary of the target {own_name}: "
            f"{'; '.join(self.differences(draft))}: choose a draft of the same model family, or "
            "set target.model to the target's folder where the draft runs"
        )

    def differences(self, other: "TokenTable", most: int = 3) -> list[str]:
        """Describe the first `most` ids whose tokens differ in `other`, the draft's table."""
        ids = sorted({*self, *other})
        pairs = ((i, self.spelling(i), other.spelling(i)) for i in ids)
        differing = ((i, mine, its) for i, mine, its in pairs if mine != its)
        return [
            f"id {i} is {_quote(mine)} in the target and {_quote(its)} in the draft"
            for (i, mine, its), _ in zip(differing, range(most), strict=False)
        ]


def read_vocabulary(tokenizer: bytes) -> dict[int, str]:
    """Return id -> token of a tokenizer.json (BPE, WordPiece, WordLevel or Unigram), added tokens
    included; `CheckpointError` if it is not one."""
    return _vocabulary_of(_parsed(tokenizer))[0]


def _parsed(tokenizer: bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(tokenizer)
    except (ValueError, RecursionError) as error:
        raise _no_vocabulary(error) from None
    if not isinstance(content, dict):
        raise CheckpointError("tokenizer.json holds no vocabulary: it is not a JSON object")
    return content


def _no_vocabulary(error: Exception) -> CheckpointError:
    return CheckpointError(
        f"tokenizer.json holds no vocabulary ({type(error).__name__}: {str(error)[:100]})"
    )


def _vocabulary_of(content: Mapping[str, Any]) -> tuple[dict[int, str], list[int], list[int]]:
    """Return the tokens by id, and the ids of special and of other added ones. As in the tokenizers
    library, an added token has the id of the model's token with its spelling, or the next free one,
    whatever the file states."""
    try:
        model = content["model"]["vocab"]
        named = (
            model.items() if isinstance(model, dict) else ((p[0], i) for i, p in enumerate(model))
        )
        pairs = {index: token for token, index in named}
        ids = model if isinstance(model, dict) else {token: i for i, token in pairs.items()}
        added, places = content.get("added_tokens") or (), dict[str, int]()
        special = {one["content"] for one in added if one.get("special")}
        listed = [one["content"] for one in added if one["content"]]
        for token in listed:
            if (index := ids.get(token)) is None:
                index = places.setdefault(token, len(ids) + len(places))
            pairs[index] = token
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise _no_vocabulary(error) from None
    if not all(
        isinstance(i, int) and 0 <= i <= LARGEST_ID and isinstance(t, str) for i, t in pairs.items()
    ):
        raise CheckpointError("tokenizer.json maps tokens to something other than ids")
    out = [index for index, token in pairs.items() if token in special]
    text = {*listed} - special
    return pairs, out, [index for index, token in pairs.items() if token in text]


def vocabulary_digest(vocabulary: Mapping[int, str]) -> str:
    """Return the SHA-256 of the (id, token) pairs in order of id."""
    digest = hashlib.sha256()
    for index in sorted(vocabulary):
        digest.update(f"{index}\0{vocabulary[index]}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _quote(token: str | None) -> str:
    return "no token" if token is None else repr(token[:40])
