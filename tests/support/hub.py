"""A small server that speaks those endpoints of the Hugging Face hub that downloads use."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from support.replying import QuietHandler, listening

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Its repositories: id -> file -> content."""

    repositories: dict[str, dict[str, bytes]]
    card: dict[str, str] = field(default_factory=lambda: {"license": "apache-2.0"})
    claimed: dict[str, int] = field(default_factory=dict)  # sizes in the description, by file
    token: str = ""  # required if not empty
    served: list[str] = field(default_factory=list)
    url: str = ""


def folder_content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextmanager
def hub(repositories: Mapping[str, dict[str, bytes]]) -> Iterator[Hub]:
    """Serve these repositories."""
    own = Hub({**repositories})

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if own.token and self.headers.get("Authorization") != f"Bearer {own.token}":
                self._refuse(401, "RepoNotFound")
            elif path.startswith("/api/models/"):
                self._describe(path.removeprefix("/api/models/"))
            else:
                self._send_file(path)

        def _describe(self, path: str) -> None:
            lists = "/tree/" in path
            name, _, revision = path.partition("/tree/" if lists else "/revision/")
            files = own.repositories.get(name)
            if files is None or revision not in ("", "main", COMMIT):
                self._refuse(404, "RepoNotFound" if files is None else "RevisionNotFound")
                return
            if lists:
                tree = [
                    {"type": "file", "path": file, "size": len(content), "oid": "0" * 40}
                    for file, content in files.items()
                ]
                self._send(200, json.dumps(tree).encode())
                return
            siblings = [
                {"rfilename": file, "size": own.claimed.get(file, len(content))}
                for file, content in files.items()
            ]
            known = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps({**known, "tags": [], "cardData": own.card}).encode())

        def _send_file(self, path: str) -> None:
            name, _, rest = path.strip("/").partition("/resolve/")
            file = rest.partition("/")[2]
            content = own.repositories.get(name, {}).get(file)
            if content is None:
                self._refuse(404, "EntryNotFound")
                return
            if self.command == "GET":
                own.served.append(file)
            first = int(self.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
            headers = {
                "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            if first:
                headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            self._send(206 if first else 200, content[first:], headers)

        def _refuse(self, status: int, code: str) -> None:
            self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

        def _send(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with listening(Handler) as own.url:
        yield own
