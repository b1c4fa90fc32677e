"""The steps of the Dockerfile, taken as a script: they build an installation that decodes."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from support.deployed import instructions
from support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "launch" / "files" / "deployment" / "Dockerfile"
AS_ROOT = ("apt-get ", "useradd ", "install --directory --owner ")
"""Steps that change the machine: they belong to a container, and are not run."""
STEP_S = 3000.0


def script(prefix: Path, sources: Path) -> list[str]:
    """The RUN steps of the Dockerfile but those, below another prefix, with torch from wherever pip
    finds everything else."""
    steps = [text for name, text in instructions(DOCKERFILE) if name == "RUN"]
    assert sum(step.startswith(AS_ROOT) for step in steps) == 3
    moved = {
        "/opt/dovetail": str(prefix),
        "${TORCH}": "",
        "python -m venv": f"{sys.executable} -m venv",
    }
    left = []
    for step in steps:
        if not step.startswith(AS_ROOT):
            for there, here in moved.items():
                step = step.replace(there, here)
            left.append(re.sub(r" /src$", f" {sources}", step))
    return left


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_steps_of_the_image_build_what_decodes_and_says_that_it_is_ready(
    tmp_path: Path,
) -> None:
    prefix, sources, cache = tmp_path / "opt", tmp_path / "src", tmp_path / "cache"
    left_out = [
        line.strip("/*")
        for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split()
    ]
    shutil.copytree(
        ROOT, sources, ignore=shutil.ignore_patterns(*left_out, "*.egg-info"), symlinks=True
    )
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "DOVETAIL_DEVICES")
    }
    for step in script(prefix, sources):
        subprocess.run(["sh", "-ec", step], check=True, timeout=STEP_S, cwd=tmp_path, env=plain)
    environment = {
        **plain,
        "PATH": f"{prefix}/bin:{plain['PATH']}",
        "XDG_CACHE_HOME": str(cache),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    facts = dict(instructions(DOCKERFILE))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [*json.loads(facts["ENTRYPOINT"]), *json.loads(facts["CMD"]), "--http.port", port]
    health = json.loads(facts["HEALTHCHECK"].partition("CMD ")[2].replace("8000", port))
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as serving:
        try:
            assert serving.stdout is not None
            assert serving.stdout.readline() == f"http://127.0.0.1:{port}\n"
            subprocess.run(health, env=environment, check=True)
            body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8}).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                body,
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 8
        finally:
            serving.terminate()
        assert serving.wait(PATIENCE_S) == 0
