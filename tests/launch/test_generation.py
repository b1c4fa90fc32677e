"""Sampling defaults that a target brings along: what is taken over, and what the user has said."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.chat.answering import PLAIN, CoordinatorAnswerer, Templated, templated
from dovetail.launch.decoding.request import Wish
from dovetail.launch.processes.connection import connected, connected_by_target
from dovetail.launch.settings.configure import Configuration, configure
from dovetail.launch.settings.generation import FILE, with_generation_config
from dovetail.protocol.errors import SettingsError, UserError
from dovetail.protocol.links import open_link
from dovetail.runtime.client import Client
from support.scripted import ScriptedTarget
from support.web import backend


def configured(folder: Path, content: Any, **flags: str) -> Configuration:
    (folder / FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    given = {name.replace("__", "."): text for name, text in flags.items()}
    return configure(flags={"target.model": str(folder), **given}, environment={})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}, (0.6, 0.95, 20, 512)),
        ({"do_sample": True}, (1.0, 1.0, 0, 512)),
        ({"do_sample": False, "temperature": 0.6}, (0.0, 1.0, 0, 512)),
        ({"temperature": 0.7, "max_new_tokens": 2048}, (0.7, 1.0, 0, 2048)),
        ({"eos_token_id": [1, 2], "temperature": None}, (0.0, 1.0, 0, 512)),
    ],
)
def test_a_targets_sampling_defaults_are_those_of_requests(
    content: dict[str, Any], expected: tuple[float, float, int, int], tmp_path: Path
) -> None:
    found, words = with_generation_config(configured(tmp_path, content))
    sampling = found.settings.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == expected
    assert bool(words) == (expected != (0.0, 1.0, 0, 512))


def test_what_the_user_says_stays_and_what_is_taken_over_is_told(tmp_path: Path) -> None:
    content = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    asked = configured(tmp_path, content, sampling__temperature="0")
    found, words = with_generation_config(asked)
    assert found.settings.sampling.temperature == 0.0
    assert found.settings.sampling.top_k == 20
    assert words.startswith(f"sampling by the target's {FILE}: top_k 20 (")
    assert found.arguments("sampling") == ["--sampling.temperature=0.0", "--sampling.top_k=20"]
    without = configured(tmp_path, content, sampling__generation_config="none")
    assert with_generation_config(without) == (without, "")


def test_a_request_to_a_target_that_runs_here_has_the_defaults_of_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE).write_text(json.dumps({"do_sample": True, "top_k": 20}))
    given = configure(flags={"sampling.temperature": "0.5"}, environment={}, demo=False)
    with backend(target=False, draft=False) as house:
        here = {"model": str(tmp_path), "host": socket.gethostname(), "pid": os.getpid()}
        worker = house.add(ScriptedTarget, "target", **here)
        with connected_by_target(given, house.address) as (_, found):
            assert found.settings.sampling == given.settings.sampling.model_copy(
                update={"top_k": 20}
            )
        assert f"sampling by the target's {FILE}: top_k 20 (" in capsys.readouterr().err
        house.lose(worker)
        house.add(ScriptedTarget, "target", **here | {"host": "elsewhere"})
        with connected_by_target(given, house.address) as (_, found):
            assert found == given
        assert capsys.readouterr().err == ""


def test_a_persons_values_reach_the_targets_template() -> None:
    thinks = "w5 {{ 'w6' if enable_thinking else 'w7' }} {{ messages[0].content }}"
    with backend(target=False, draft=False) as house:
        house.add(ScriptedTarget, "target", template=thinks)
        with Client(open_link(house.address, role="client")) as client:
            assert templated(client, {}) is None
            asked = [
                Templated(client, {"enable_thinking": wanted}).submitted(("w8",))["tokens"]
                for wanted in (True, False)
            ]
            assert asked == [(5, 6, 8), (5, 7, 8)]
            with pytest.raises(UserError, match=r"kwargs .*tools may not be among them"):
                Templated(client, {"tools": []})
        house.lose(house.workers[0])
        house.add(ScriptedTarget, "target", template="")
        with (
            Client(open_link(house.address, role="client")) as client,
            pytest.raises(UserError, match="the target has none"),
        ):
            Templated(client, {"enable_thinking": True})


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("{", "is not JSON"), ("[]", "no JSON object"), ('{"top_p": 7}', "sampling.top_p")],
)
def test_a_damaged_file_is_one_error_that_names_it(
    content: str, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=complaint) as raised:
        with_generation_config(configured(tmp_path, content))
    assert str(tmp_path / FILE) in str(raised.value)


def test_without_a_chat_template_a_prompt_is_continued_and_that_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with backend(target=False, draft=False) as house:
        house.add(ScriptedTarget, "target", template="")
        with connected(configure(environment={}), house.address) as connection:
            for raw in (False, True):
                wish = Wish(configure(environment={}), raw=raw)
                wish.to(connection, wish.configuration)
                assert (f"{PLAIN}\n" in capsys.readouterr().err) == (not raw)
            assert CoordinatorAnswerer(connection).no_chats() == PLAIN
