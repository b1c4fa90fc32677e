"""A pair in GGUF files on the command line: the texts of the same pair in safetensors."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.workers import kernels
from support.gguf_files import tokens_of, write_gguf

Run = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")


def mix(name: str, shape: tuple[int, ...]) -> Type:
    """The types of a file that llama.cpp calls Q4_K_M."""
    better = any(part in name for part in ("attn_v", "ffn_down", "output.", "token_embd"))
    if shape[-1] % 256:
        return Type.Q8_0 if better else Type.Q5_0
    return Type.Q6_K if better else Type.Q4_K


@pytest.mark.slow
def test_a_mix_of_blocks_says_the_same_with_speculation_and_without(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    write_gguf(DEMO_FOLDER / "target", file, mix, **tokens_of(DEMO_FOLDER / "target"))
    said = []
    for draft in (["--draft", str(file)], ["--draft.kind", "none"]):
        arguments = ["--target", str(file), *draft, "--temperature", "1"]
        result = run(
            "generate", *arguments, "--seed", "7", "--max-tokens", "24", "--json", "A star"
        )
        assert result.returncode == 0, result.stderr
        assert "bits a number), weights file: its blocks" in result.stderr
        said.append(json.loads(result.stdout))
    assert said[0]["text"] == said[1]["text"]


@pytest.mark.slow
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
            arguments += ["--weights", "fp32"]
            more = ["--temperature", temperature, "--max-tokens", "24", "--json"]
            result = run("generate", *arguments, *more, "What is a star?")
            assert result.returncode == 0, result.stderr
            said.append(json.loads(result.stdout)["text"])
            if target in files:
                assert f"{target.name} ({kind.name} " in result.stderr
        assert said[-2] == said[-1]
