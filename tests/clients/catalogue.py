"""The clients that are tried, what each needs, and the script that drives it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SCRIPTS = Path(__file__).resolve().parent / "scripts"


@dataclass(frozen=True)
class ClientKind:
    """A client of the HTTP API: a name, what pip or npm installs for it, and the script that
    asserts what it should see."""

    name: str
    requirements: tuple[str, ...]
    script: str
    program: Literal["python", "node", "java"] = "python"
    tools: bool = False
    """Its script needs a model whose template has tools."""

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
    ClientKind("pydantic-ai", ("pydantic-ai-slim[openai]>=2",), "pydantic_ai_sdk.py", tools=True),
    ClientKind("instructor", ("instructor>=1.17",), "instructor_sdk.py", tools=True),
    ClientKind(
        "llama-index", ("llama-index-llms-openai-like>=0.8",), "llama_index_sdk.py", tools=True
    ),
    ClientKind("huggingface-hub", ("huggingface_hub>=2",), "huggingface_hub_sdk.py", tools=True),
    ClientKind(
        "ai-sdk",
        ("ai@6", "@ai-sdk/openai-compatible@2", "zod@4"),
        "ai_sdk.mjs",
        program="node",
        tools=True,
    ),
    ClientKind("java.net.http", (), "jdk_client.java", program="java", tools=True),
)
BY_NAME = {client.name: client for client in CLIENTS}
