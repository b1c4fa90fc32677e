"""openai-python against a real server; the other clients, each in an environment of its own, by
`python tests/clients`."""

import sys
from pathlib import Path

from clients.catalogue import CLIENTS, ClientKind
from clients.commands import try_client
from clients.server import serving


def test_openai_python_sees_what_it_should() -> None:
    with serving() as url:
        row = try_client(ClientKind("openai", (), "openai_sdk.py"), Path(sys.executable), url)
    assert row["ok"], row["what"]


def test_every_client_has_a_script() -> None:
    assert all(client.path.is_file() and client.requirements for client in CLIENTS)
