"""Answers of the target: the same as one token at a time, whatever is written beside them, kept
line by line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.protocol.errors import UserError
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import Sampling
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.training.data.chats import Chat, Message, Renderer
from dovetail.workers.training.data.corpus import open_reader, read_examples
from dovetail.workers.training.regenerate import AnswerWriter, Outcome, Writing, regenerate
from dovetail.workers.training.run import Progress
from support.models import reference_tokens

TARGET = Path(__file__).resolve().parents[2] / "launch" / "demo" / "target"
CHATS = [
    Chat(
        "1",
        (
            Message("user", "Hello"),
            Message("assistant", "Somebody else's words"),
            Message("user", "What is a window made from?"),
        ),
    ),
    Chat("2", (Message("user", "How many legs does a cat have?"),)),
    Chat("3", text="No question."),
    Chat("4", (Message("user", "word " * 600),)),
]
WRITING = Writing(new_tokens=24, sessions=3, seed=7)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_language_model(str(TARGET), weights="fp32", device="cpu")


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return open_reader(str(TARGET)).renderer


@pytest.fixture(scope="module")
def whole(
    model: LanguageModel, renderer: Renderer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Outcome]:
    """All answers, written at one go."""
    out = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    return out, regenerate(CHATS, model, renderer, out, WRITING)


def rows(file: Path) -> dict[str, Any]:
    return {
        row["id"]: row for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())
    }


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_answer_is_what_the_target_emits_alone(
    model: LanguageModel, renderer: Renderer, temperature: float
) -> None:
    writer = AnswerWriter(model)
    prompts = [renderer.prompt(chat.messages[:1]) for chat in CHATS[:2]]
    keys = [session_key(3, number, prompt) for number, prompt in enumerate(prompts)]
    for prompt, key in zip(prompts, keys, strict=True):
        writer.ask(prompt, temperature=temperature, key=key, new_tokens=12)
    answers: dict[bytes, list[int]] = {}
    while len(writer):
        answers |= {session.key: answer for session, answer in writer.step()}
    for prompt, key in zip(prompts, keys, strict=True):
        answer = answers[key]
        assert answer == reference_tokens(
            TARGET, prompt, len(answer), key=key, sampling=Sampling(temperature=temperature)
        )
        assert writer.ended(answer) or len(answer) == 12
    assert writer.written == sum(map(len, answers.values()))


def test_tokens_that_the_target_never_chooses_are_in_no_answer(
    model: LanguageModel, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    never: set[int] = set()
    for _ in range(2):
        monkeypatch.setattr(model, "suppressed", tuple(never))
        writer, answer = AnswerWriter(model), list[int]()
        prompt = renderer.prompt(CHATS[0].messages[:1])
        writer.ask(prompt, temperature=0.0, key=bytes(16), new_tokens=6)
        while len(writer):
            answer = [token for _, tokens in writer.step() for token in tokens]
        assert answer
        assert not never & {*answer}
        never = {*answer[:3]}


def test_chat_is_answered_turn_by_turn_behind_the_targets_own_answers(
    whole: tuple[Path, Outcome],
) -> None:
    found = rows(whole[0])
    assert set(found) == {"1@0", "1@1", "2@0", "2@1"}
    said = found["1@0"]["messages"]
    assert [message["role"] for message in said] == ["user", "assistant", "user", "assistant"]
    assert [said[0]["content"], said[2]["content"]] == ["Hello", "What is a window made from?"]
    assert said[1]["content"] != "Somebody else's words"
    assert "glass" in said[3]["content"]
    assert whole[1] == Outcome(
        4,
        {
            "without a question": 1,
            "whose question does not fit into the context, or is refused by the chat template": 2,
        },
    )


def test_answer_does_not_depend_on_what_is_written_beside_it(
    whole: tuple[Path, Outcome], model: LanguageModel, renderer: Renderer, tmp_path: Path
) -> None:
    alone = tmp_path / "alone.jsonl"
    regenerate(CHATS, model, renderer, alone, Writing(new_tokens=24, sessions=1, seed=7))
    assert rows(alone) == rows(whole[0])


def test_interrupted_writing_goes_on_and_a_broken_line_is_written_again(
    whole: tuple[Path, Outcome], model: LanguageModel, renderer: Renderer, tmp_path: Path
) -> None:
    out, seen = tmp_path / "cut.jsonl", list[Progress]()

    def stop(at: Progress) -> None:
        if at.steps == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(CHATS, model, renderer, out, WRITING, progress=stop)
    kept = out.read_bytes()
    assert 0 < len(rows(out)) < 4
    out.write_bytes(kept + b'{"id": "1@')
    regenerate(CHATS, model, renderer, out, WRITING, progress=seen.append)
    assert out.read_bytes().startswith(kept)
    assert rows(out) == rows(whole[0])
    assert seen[-1].done == 1


def test_file_of_other_chats_is_not_gone_on_with(
    whole: tuple[Path, Outcome], model: LanguageModel, renderer: Renderer
) -> None:
    for chats, writing in ((CHATS[1:], WRITING), (CHATS, Writing(temperatures=(0.5,)))):
        with pytest.raises(
            UserError,
            match=r"line 1, is not an answer of this target to these "
            r"chats",
        ):
            regenerate(chats, model, renderer, whole[0], writing)


@pytest.mark.parametrize(("name", "other"), [("seed", 8), ("new_tokens", 25)])
def test_answers_written_with_other_settings_are_not_kept(
    whole: tuple[Path, Outcome], model: LanguageModel, renderer: Renderer, name: str, other: int
) -> None:
    was = getattr(WRITING, name)
    with pytest.raises(UserError, match=f"line 1, was written with {name} {was}, not {other}: "):
        regenerate(CHATS, model, renderer, whole[0], replace(WRITING, **{name: other}))


def test_what_was_written_is_read_as_chats_and_a_long_answer_does_not_end(
    model: LanguageModel, renderer: Renderer, tmp_path: Path
) -> None:
    for new_tokens, reason in ((2, "length"), (40, "stop")):
        out = tmp_path / f"{reason}.jsonl"
        regenerate(
            CHATS[1:2], model, renderer, out, Writing(temperatures=(0.0,), new_tokens=new_tokens)
        )
        assert rows(out)["1@0"]["finish_reason"] == reason
        (row,) = read_examples([out], open_reader(str(TARGET))).rows
        assert (row.tokens[-1] in model.end) == (reason == "stop")
        assert row.learn.sum() == 2 if reason == "length" else row.learn.sum() > 2
        assert row.tokens[: -row.learn.sum()].tolist() == renderer.prompt(CHATS[1].messages)
