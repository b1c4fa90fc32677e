"""The clients that are tried, what each needs, and the script that drives it."""

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent / "scripts"


@dataclass(frozen=True)
class ClientKind:
    """A client of the HTTP API: a name, what pip installs for it, and the script that asserts what
    it should see."""

    name: str
    requirements: tuple[str, ...]
    script: str

    @property
    def path(self) -> Path:
        return SCRIPTS / self.script


CLIENTS = (
    ClientKind("openai-2", ("openai>=2,<3",), "openai_sdk.py"),
    ClientKind("openai-3", ("openai>=3,<4",), "openai_sdk.py"),
    ClientKind("litellm", ("litellm>=1.100",), "litellm_sdk.py"),
    ClientKind("langchain-openai", ("langchain-openai>=1",), "langchain_sdk.py"),
    ClientKind("llm", ("llm>=0.30",), "llm_cli.py"),
    ClientKind("lm-eval", ("lm-eval[api]>=0.4.9", "transformers>=5,<6"), "lm_eval_cli.py"),
    ClientKind("inspect-ai", ("inspect-ai>=0.3.200", "openai>=2"), "inspect_cli.py"),
    ClientKind("guidellm", ("guidellm>=0.8,<0.9",), "guidellm_cli.py"),
    ClientKind("vllm", ("vllm[bench]>=0.33,<0.34",), "vllm_bench.py"),
    ClientKind("schemathesis", ("schemathesis>=4",), "schemathesis_cli.py"),
)
BY_NAME = {client.name: client for client in CLIENTS}
