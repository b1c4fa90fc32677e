"""openai-python against a real server; the other clients, each in an environment of its own, by
`python tests/clients`."""

import sys
from pathlib import Path

from clients.catalogue import CLIENTS, ClientKind
from clients.commands import try_client

from dovetail.launch.processes.stack import Stack
from support.web import api

FLAGS = ("--http.model=dovetail", "--policy=dynamic", "--tree.insist=true")


def test_openai_python_sees_what_it_should(stack: Stack) -> None:
    with api(stack.address, *FLAGS) as served:
        row = try_client(
            ClientKind("openai", (), "openai_sdk.py"), Path(sys.executable), served.url
        )
    assert row["ok"], row["what"]


def test_every_client_has_a_script() -> None:
    assert all(client.path.is_file() and client.requirements for client in CLIENTS)
