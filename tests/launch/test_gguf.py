"""A pair in GGUF files on the command line: the texts of the same pair in safetensors."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.workers import kernels
from support.gguf_files import tokens_of, write_gguf

Run = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built"),
    pytest.mark.slow,
]


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_pair_in_gguf_says_what_it_says_in_safetensors(
    run: Run, tmp_path: Path, temperature: str
) -> None:
    said = []
    for kind in (Type.F16, Type.Q8_0):
        files, twins = [], []
        for role in ("target", "draft"):
            folder = DEMO_FOLDER / role
            file = tmp_path / f"{role}-{kind.name}.gguf"
            facts = tokens_of(folder)
            facts["tokenizer.chat_template"] = (folder / "chat_template.jinja").read_text()
            twins.append(write_gguf(folder, file, lambda *_, kind=kind: kind, **facts))
            files.append(file)
        for target, draft in (files, twins):
            arguments = ["--target", str(target), "--draft", str(draft), "--seed", "7"]
            more = ["--temperature", temperature, "--max-tokens", "24", "--json"]
            result = run("generate", *arguments, *more, "What is a star?")
            assert result.returncode == 0, result.stderr
            said.append(json.loads(result.stdout)["text"])
            if target in files:
                assert f"{target.name} ({kind.name} " in result.stderr
        assert said[-2] == said[-1]
