"""llm, the command line tool: a chat and a completion model of a YAML file."""

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

URL, MODEL = os.environ["DOVETAIL_URL"], os.environ["DOVETAIL_MODEL"]
HOME = Path.cwd() / "llm"
HOME.mkdir()
(HOME / "extra-openai-models.yaml").write_text(
    f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {URL}\n- model_id: ours-text\n  "
    f"model_name: {MODEL}\n  api_base: {URL}\n  completion: true\n"
)


def llm(*arguments: str) -> str:
    return subprocess.run(
        ["llm", *arguments],
        env={**os.environ, "LLM_USER_PATH": str(HOME)},
        check=True,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    ).stdout


streamed = llm(
    "-m", "ours", "-o", "temperature", "0", "-o", "max_tokens", "16", "Why is the sky blue?"
)
assert streamed.strip()
assert (
    llm(
        "-m",
        "ours",
        "--no-stream",
        "-o",
        "temperature",
        "0",
        "-o",
        "max_tokens",
        "16",
        "Why is the sky blue?",
    ).strip()
    == streamed.strip()
)
assert llm(
    "-m", "ours-text", "-o", "temperature", "0", "-o", "max_tokens", "8", "Once upon"
).strip()
print(json.dumps({"version": version("llm"), "what": "chat streamed and whole, text completion"}))
