"""The text of replies over HTTP, for vocabularies whose words include their spaces, and stop
strings."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from support.scripted import END, VOCABULARY, ScriptedTarget, continuation
from support.web import Api, api, backend

TEXTS = "/v1/completions"
BEGIN, TURN = 1, 2
LLAMA = [
    decoders.Replace("\u2581", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
DECODERS: dict[str, Any] = {
    "Llama 2": decoders.Sequence(LLAMA),
    "Metaspace": decoders.Metaspace(prepend_scheme="first"),
}


def spaced(decoder: Any) -> Tokenizer:
    """Words with the spaces before them; 1 begins a text, 2 a turn."""
    words = {f"\u2581w{index}": index for index in range(3, VOCABULARY)}
    made = Tokenizer(
        models.WordLevel({"<end>": END, "<begin>": BEGIN, "<turn>": TURN, **words}, "<begin>")
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoder
    made.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", BEGIN)]
    )
    special = [AddedToken(one, special=True) for one in ("<end>", "<begin>", "<turn>")]
    made.add_special_tokens(special)
    return made


def agree(choice: dict[str, Any], *, put_before: int = 0) -> None:
    """Check that the tokens of a choice and their offsets match its text; `put_before`: number of
    tokens that the tokenizer has added before the text."""
    told, text = choice["logprobs"], choice["text"]
    assert "".join(told["tokens"][put_before:]) == text
    for token, offset in list(zip(told["tokens"], told["text_offset"], strict=True))[put_before:]:
        assert text[offset : offset + len(token)] == token


@pytest.mark.parametrize("name", DECODERS)
def test_a_completion_goes_on_where_its_prompt_ends(name: str) -> None:
    made = spaced(DECODERS[name])
    with backend(target=False, draft=False) as house, api(house.address) as server:
        house.add(ScriptedTarget, "target", tokenizer=made.to_str().encode())
        text, prompt, said = next(
            (text, prompt, said)
            for last in range(3, VOCABULARY)
            if (prompt := made.encode(text := f"w5 w{last}").ids)
            if min(said := continuation(prompt, 9)) > TURN
        )
        reply = "".join(f" w{token}" for token in said)
        assert server.complete(text, max_tokens=9)["choices"][0]["text"] == reply
        assert server.chat("w5 w6", max_tokens=1)["choices"][0]["message"]["content"][:1] == " "
        whole = server.complete(text, max_tokens=9, echo=True, logprobs=0)["choices"][0]
        assert whole["text"] == f"{text}{reply}" == made.decode([*prompt, *said])
        agree(whole, put_before=1)
        events = server.stream(TEXTS, prompt=text, max_tokens=9, echo=True)
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole["text"]
        turned = server.complete("w5<turn> w6", max_tokens=2, echo=True, logprobs=0)["choices"][0]
        assert turned["text"].startswith("w5<turn> w6 w")
        agree(turned, put_before=1)
        ids = server.complete(prompt, max_tokens=9, echo=True, logprobs=0)["choices"][0]
        assert ids["text"] == whole["text"]
        first = server.complete([BEGIN], max_tokens=3, logprobs=0, ignore_eos=True)["choices"][0]
        assert first["text"][:1] == "w"  # there is no text before it


def asked(server: Api, prompt: list[int], stream: bool, **fields: Any) -> tuple[str, str, int]:
    """Return the text of a reply, its finish reason and its number of tokens."""
    if not stream:
        reply = server.complete(prompt, **fields)
        choice = reply["choices"][0]
        return choice["text"], choice["finish_reason"], reply["usage"]["completion_tokens"]
    fields["stream_options"] = {"include_usage": True}
    *events, usage = server.stream(TEXTS, prompt=prompt, **fields)[:-1]
    text = "".join(event["choices"][0]["text"] for event in events)
    reason = events[-1]["choices"][0]["finish_reason"]
    return text, reason, usage["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_and_strings_stop_a_reply_after_min_tokens(stream: bool) -> None:
    made = spaced(DECODERS["Llama 2"])
    with backend(target=False, draft=False) as house, api(house.address) as server:
        house.add(ScriptedTarget, "target", tokenizer=made.to_str().encode())
        prompt, said = next(
            (prompt, said)
            for first in range(3, VOCABULARY)
            if (prompt := [5, 6, first]) and (said := continuation(prompt, 60))
            if TURN in said[2:20] and END not in said and BEGIN not in said
        )
        at, words = said.index(TURN), [f" w{token}" if token > TURN else "" for token in said]
        fields: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
        ended = asked(server, prompt, stream, stop="<turn>", **fields)
        assert ended == ("".join(words[:at]), "stop", at + 1)
        ended = asked(server, prompt, stream, stop=f"{words[at - 1]}<turn>", **fields)
        assert ended == ("".join(words[: at - 1]), "stop", at + 1)
        late = asked(server, prompt, stream, stop="<turn>", min_tokens=at + 1, **fields)
        assert late[2] > at + 1
        word = f"{words[1]} "
        places = [place for place in range(58) if (words[place] + " ")[:4] == word[:4]]
        ended = asked(server, prompt, stream, stop=word[:4], min_tokens=places[0] + 1, **fields)
        assert ended[2] == (places[1] + 1 if len(places) > 1 else 60)
