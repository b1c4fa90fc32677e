"""openai-python against a real server; the other clients, each in an environment of its own, by
`python tests/clients`."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients.catalogue import CLIENTS, ClientKind
from clients.commands import try_client

from dovetail.launch.processes.stack import Stack
from support.web import api

README = Path(__file__).parents[1] / "README.md"
FLAGS = ("--http.model=dovetail", "--policy=dynamic", "--tree.insist=true")


@pytest.fixture(scope="module")
def url(stack: Stack) -> Iterator[str]:
    with api(stack.address, *FLAGS) as served:
        yield served.url


def test_openai_python_sees_what_it_should(url: str) -> None:
    row = try_client(ClientKind("openai", (), "openai_sdk.py"), Path(sys.executable), url)
    assert row["ok"], row["what"]


def test_the_client_of_the_readme_prints_a_reply(url: str) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block.count("http://127.0.0.1:8000") == 1
    command = [sys.executable, "-c", block.replace("http://127.0.0.1:8000", url)]
    reply = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "sky" in reply


def test_every_client_has_a_script() -> None:
    assert all(
        client.path.is_file() and (client.requirements or client.program == "java")
        for client in CLIENTS
    )
