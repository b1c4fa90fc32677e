"""Chats: every form of a line is read, and what is learned is what the target would have written,
told by re-tokenising and by its text."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dovetail.protocol.errors import UserError
from dovetail.workers.training.data.chats import Chat, Message, RefusedError, Renderer, read_chats
from dovetail.workers.training.data.corpus import open_reader, read_examples, read_rows
from dovetail.workers.training.data.examples import Example

TARGET = Path(__file__).resolve().parents[2] / "launch" / "demo" / "target"
CHATML = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKED = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>
{% endfor %}"""  # noqa: E501
FORGETFUL = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501
PROMPTING = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}"
    + CHATML
)
JOINING = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if not "
    "add_generation_prompt %}<|im_end|>{% endif %}"
)
TALK = (
    Message("user", "Hello there"),
    Message("assistant", "Hi!\nHow are you?"),
    Message("user", "Fine."),
    Message("assistant", " Good to hear"),
)


def renderer(template: str) -> Renderer:
    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = template
    return Renderer(tokenizer, None, [tokenizer.convert_tokens_to_ids("<|im_end|>")])


def learned(of: Renderer, example: Example) -> list[str]:
    """The texts of the stretches that are learned."""
    texts, previous = list[list[int]](), False
    for token, learn in zip(example.tokens.tolist(), example.learn.tolist(), strict=True):
        if learn and not previous:
            texts.append([])
        if learn:
            texts[-1].append(token)
        previous = learn
    return [of._tokenizer.decode(text) for text in texts]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
        {
            "conversations": [
                {"from": "gpt", "value": "Welcome!"},
                {"from": "user", "value": "Hello"},
                {"from": "assistant", "value": "Hi"},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]},
            ]
        },
        {"turns": ["Hello", "Hi"], "kind": "chat"},
        {"prompt": "Hello", "response": "Hi"},
    ],
)
def test_each_form_of_a_line_is_the_same_chat(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("\n" + json.dumps(row) + "\n")
    assert [chat.messages for chat in read_chats(tmp_path / "chats.jsonl")] == [
        (Message("user", "Hello"), Message("assistant", "Hi"))
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "none of"),
        ('{"turns": []}', "not a list"),
        ('{"turns": [1]}', "not text"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "no role 'tool'"),
        ('{"messages": [{"role": "user"}]}', "not an object with"),
        ('{"turns": ["\\ud800"]}', "not text"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_broken_line_is_one_error_with_file_and_line(
    line: str, complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"turns": ["a\u2028b", "b"]}, ensure_ascii=False) + "\n" + line + "\n"
    )
    with pytest.raises(UserError, match=rf"chats\.jsonl, line 2.*{complaint}"):
        list(read_chats(tmp_path / "chats.jsonl"))


def test_file_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_bytes(b'{"turns": ["\xff"]}\n')
    with pytest.raises(UserError, match=r"line \d+ is not UTF-8 text: byte \d+ .*save it as UTF-8"):
        list(read_chats(tmp_path / "chats.jsonl"))


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_are_learned_with_the_id_that_ends_them_and_nothing_else(template: str) -> None:
    of = renderer(template)
    (example,) = of.examples(Chat("here", TALK))
    assert learned(of, example) == ["Hi!\nHow are you?<|im_end|>", " Good to hear<|im_end|>"]
    assert example.learn[-1]


def test_what_is_learned_stands_behind_the_prompt_that_the_target_is_asked_with() -> None:
    of = renderer(CHATML)
    (example,) = of.examples(Chat("here", TALK))
    for number in (1, 3):
        prompt = of.prompt(TALK[:number])
        assert example.tokens[: len(prompt)].tolist() == prompt
        assert example.learn[len(prompt)]
        assert not example.learn[len(prompt) - 1]


def test_embedded_target_learns_the_same_ids_as_it_writes() -> None:
    of = open_reader(str(TARGET)).renderer
    (example,) = of.examples(Chat("here", TALK))
    assert learned(of, example) == ["Hi!\nHow are you?<|end|>", " Good to hear<|end|>"]


def test_template_that_rewrites_what_was_said_gives_a_sequence_for_each_answer() -> None:
    of = renderer(FORGETFUL)
    talk = (
        Message("user", "One"),
        Message("assistant", "hm</think>1"),
        Message("user", "Two"),
        Message("assistant", "so</think>2"),
    )
    first, second = of.examples(Chat("here", talk))
    assert learned(of, first) == ["hm</think>1<|im_end|>"]
    assert learned(of, second) == ["so</think>2<|im_end|>"]
    assert "hm" not in of._tokenizer.decode(second.tokens)
    assert second.tokens[: len(of.prompt(talk[:3]))].tolist() == of.prompt(talk[:3])


def test_words_that_only_the_question_has_stay_before_the_answer() -> None:
    of = renderer(PROMPTING)
    of._tokenizer.eos_token = "<|im_end|>"
    first, second = of.examples(Chat("here", TALK))
    assert learned(of, first) == ["Hi!\nHow are you?<|im_end|>"]
    assert second.tokens[: len(of.prompt(TALK[:3]))].tolist() == of.prompt(TALK[:3])


def test_answer_that_was_cut_off_does_not_end() -> None:
    of = renderer(CHATML)
    (example,) = of.examples(Chat("here", TALK, whole=False))
    assert learned(of, example) == ["Hi!\nHow are you?<|im_end|>", " Good to hear"]


def test_id_across_the_edge_of_an_answer_is_not_learned() -> None:
    of = renderer(JOINING)
    together, apart = of._ids("something"), of._ids("some") + of._ids("thing")
    assert len(together) < len(apart)
    (example,) = of.examples(
        Chat("here", (Message("user", "some"), Message("assistant", "thing else")))
    )
    assert "thing" not in learned(of, example)[0]
    assert learned(of, example)[0].endswith(" else<|im_end|>")


def test_text_is_learned_whole_behind_the_begin_id() -> None:
    of = open_reader(str(TARGET)).renderer
    (example,) = of.examples(Chat("here", text="A story."))
    assert of._tokenizer.decode(example.tokens) == "<|begin|>A story.<|end|>"
    assert example.learn.tolist() == [False] + [True] * (len(example.tokens) - 1)


def test_chats_without_answer_or_refused_by_the_template_are_counted(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="no system prompt"):
        renderer(STRICT).examples(Chat("here", (Message("system", "x"), *TALK)))
    lines = [{"turns": ["Hello"]}, {"turns": ["Hello", "Hi"]}, {"turns": ["Hello", ""]}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_examples([tmp_path / "chats.jsonl"], open_reader(str(TARGET)))
    assert len(found.rows) == 2  # that an answer ends at once can be learned too
    assert found.left_out == {"without an answer": 1}


def test_long_sequences_are_cut_or_dropped(tmp_path: Path) -> None:
    lines = [
        {"turns": ["Hello", "Hi " * 50]},
        {"turns": ["Hello", "Hi"]},
        {"turns": ["Hello " * 50, "Hi"]},
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    reader = open_reader(str(TARGET))
    cut = read_examples([tmp_path / "chats.jsonl"], reader, context=32)
    assert (len(cut.rows), cut.cut, cut.left_out) == (
        2,
        1,
        {"without anything to learn within 32 tokens": 1},
    )
    assert max(len(row.tokens) for row in cut.rows) == 32
    dropped = read_examples([tmp_path / "chats.jsonl"], reader, context=32, drop_long=True)
    assert (len(dropped.rows), dropped.cut, dropped.left_out) == (
        1,
        0,
        {"longer than 32 tokens": 2},
    )


def test_without_a_template_messages_are_plain_lines(tmp_path: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = None
    of = Renderer(tokenizer, None, [tokenizer.eos_token_id])
    (tmp_path / "chats.jsonl").write_text(json.dumps({"turns": ["Hello", "Hi there"]}))
    (row,) = read_rows([tmp_path / "chats.jsonl"], of)
    assert of.is_plain
    assert row.tokens[~row.learn].tolist() == of.prompt([Message("user", "Hello")])
    assert learned(of, row) == ["Hi there<|end|>"]
