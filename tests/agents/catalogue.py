"""The agents that are tried: what npm installs for each, its licence, how it is pointed at a
server, and the calls that write and read a file with its tools."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDINGS = Path(__file__).resolve().parent / "recordings"
MODEL = "dovetail"
FILE = "notes.txt"
LINE = "apples"
TASK = f"Write the word {LINE} into the file {FILE}, then read the file and say what is in it."


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class AgentKind:
    """An agent: its npm package and version, its licence, and how it is run."""

    name: str
    package: str
    version: str
    licence: str
    route: str
    program: tuple[str, ...]
    """The command: a path below `node_modules`, after `node` where it is a script."""
    arguments: tuple[str, ...]
    """All but the task, which comes last."""
    files: Callable[[str], Mapping[str, str]]
    """Files in its home that point it at a server's URL."""
    environment: Callable[[str], Mapping[str, str]]
    calls: Callable[[Path], tuple[Call, ...]]
    """The calls of the script, for the folder that it works in."""

    @property
    def public(self) -> bool:
        """Whether its licence allows its requests to be published."""
        return self.licence in ("Apache-2.0", "MIT")

    @property
    def recording(self) -> Path:
        return RECORDINGS / f"{self.name}.jsonl"


def _no_variables(url: str) -> Mapping[str, str]:
    return {}


def _no_files(url: str) -> Mapping[str, str]:
    return {}


def _written_and_read(write: str, read: str, key: str, path: str) -> tuple[Call, ...]:
    """The calls of two tools whose argument `key` is the file's path."""
    return Call(write, {key: path, "content": f"{LINE}\n"}), Call(read, {key: path})


def _codex_files(url: str) -> Mapping[str, str]:
    return {
        ".codex/config.toml": f"""\
model = "{MODEL}"
model_provider = "local"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
""",
    }


def _codex_calls(work: Path) -> tuple[Call, ...]:
    return (
        Call("exec_command", {"cmd": f"echo {LINE} > {FILE}"}),
        Call("exec_command", {"cmd": f"cat {FILE}"}),
    )


def _claude_variables(url: str) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def _claude_calls(work: Path) -> tuple[Call, ...]:
    return _written_and_read("Write", "Read", "file_path", str(work / FILE))


def _opencode_files(url: str) -> Mapping[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 32768, "output": 1024}}},
    }
    config = {
        "provider": {"local": provider},
        "model": f"local/{MODEL}",
        "autoupdate": False,
        "share": "disabled",
    }
    return {".config/opencode/opencode.json": json.dumps(config)}


def _opencode_calls(work: Path) -> tuple[Call, ...]:
    return _written_and_read("write", "read", "filePath", str(work / FILE))


def _pi_files(url: str) -> Mapping[str, str]:
    provider = {
        "baseUrl": f"{url}/v1",
        "api": "openai-completions",
        "apiKey": "none",
        "models": [{"id": MODEL, "contextWindow": 32768, "maxTokens": 1024}],
    }
    return {".pi/agent/models.json": json.dumps({"providers": {"local": provider}})}


def _pi_calls(work: Path) -> tuple[Call, ...]:
    return _written_and_read("write", "read", "path", FILE)


AGENTS = (
    AgentKind(
        name="codex",
        package="@openai/codex",
        version="0.171.0",
        licence="Apache-2.0",
        route="/v1/responses",
        program=("@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",),
        arguments=(
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
        ),
        files=_codex_files,
        environment=_no_variables,
        calls=_codex_calls,
    ),
    AgentKind(
        name="claude-code",
        package="@anthropic-ai/claude-code",
        version="2.1.332",
        licence="proprietary",
        route="/v1/messages",
        program=("@anthropic-ai/claude-code-linux-x64/claude",),
        arguments=("--model", MODEL, "--allowedTools", "Write,Read", "-p"),
        files=_no_files,
        environment=_claude_variables,
        calls=_claude_calls,
    ),
    AgentKind(
        name="opencode",
        package="opencode-ai",
        version="1.18.33",
        licence="MIT",
        route="/v1/chat/completions",
        program=("opencode-linux-x64/bin/opencode",),
        arguments=("run",),
        files=_opencode_files,
        environment=_no_variables,
        calls=_opencode_calls,
    ),
    AgentKind(
        name="pi",
        package="@mariozechner/pi-coding-agent",
        version="0.73.1",
        licence="MIT",
        route="/v1/chat/completions",
        program=("node", "@mariozechner/pi-coding-agent/dist/cli.js"),
        arguments=("--provider", "local", "--model", MODEL, "--offline", "-p"),
        files=_pi_files,
        environment=_no_variables,
        calls=_pi_calls,
    ),
)
BY_NAME = {agent.name: agent for agent in AGENTS}
