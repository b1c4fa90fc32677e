"""Completion of command lines, by the scripts that shells read."""

import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.launch.console.completion import SCRIPTS
from support.patience import PATIENCE_S

Run = Callable[..., subprocess.CompletedProcess[str]]

COMMAND = shlex.join((sys.executable, "-P", "-m", "dovetail.launch.cli"))
MOST_CPU_S = 0.4


@pytest.fixture
def asked(environment: dict[str, str], tmp_path: Path) -> Callable[..., list[str]]:
    """Completes the last of some words, in an empty folder and with an empty cache of the hub."""

    def asked(*words: str) -> list[str]:
        line = [*shlex.split(COMMAND), "completion", "--words", "--", *words]
        done = subprocess.run(
            line,
            env={**environment, "HF_HUB_CACHE": str(tmp_path / "hub")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        assert done.stderr == ""
        return done.stdout.split()

    return asked


def test_commands_options_values_and_models_are_completed(
    asked: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "hub" / "models--Qwen--Qwen3-8B").mkdir(parents=True)
    (tmp_path / "models" / "c").mkdir(parents=True)
    for name in ("a.gguf", "b.txt"):
        (tmp_path / "models" / name).touch()
    assert asked("ser") == ["serve"]
    assert asked("config", "export", "") == ["compose", "grafana", "kubernetes", "systemd"]
    assert asked("serve", "--tree.gam") == ["--tree.gamma"]
    assert asked("serve", "--tree.policy", "hetero") == ["heterospec"]
    assert asked("serve", "--tree.policy", "=", "hetero") == ["heterospec"]  # as bash splits it
    assert asked("serve", "--tree.policy=hetero") == ["--tree.policy=heterospec"]
    assert asked("generate", "--draft", "ng") == ["ngram"]
    assert asked("serve", "Qw") == asked("plan", "--target", "Qw") == ["Qwen/Qwen3-8B"]
    assert asked("serve", "models/") == ["models/a.gguf", "models/c/"]
    assert asked("completion", "") == [*SCRIPTS]
    assert asked("serve", "--http.api_key_file", "") == []  # the shell completes files


def test_a_completion_is_fast_once_its_table_exists(asked: Callable[..., list[str]]) -> None:
    asked("")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    asked("serve", "--draft", "")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_CPU_S


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        (
            "bash",
            'COMP_WORDS=(dovetail serve --draft ng); COMP_CWORD=3; _dovetail; echo "$COMPREPLY"',
        ),
        ("zsh", "words=(dovetail serve --draft ng); CURRENT=4; compadd() { echo $2 }; _dovetail"),
        ("fish", "complete -C 'dovetail serve --draft ng'"),
    ],
)
def test_the_script_of_a_shell_completes(
    run: Run, environment: dict[str, str], tmp_path: Path, shell: str, line: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    program = tmp_path / "bin" / "dovetail"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {COMMAND} "$@"\n')
    program.chmod(0o755)
    script = run("completion", shell).stdout.replace("compdef ", ": compdef ")
    done = subprocess.run(
        [shell, "-c", f"{script}\n{line}"],
        env={**environment, "PATH": f"{program.parent}{os.pathsep}{environment['PATH']}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.split() == ["ngram"], done.stderr


def test_another_shell_is_refused(invoke: Run) -> None:
    done = invoke("completion", "tcsh")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "dovetail: name a shell, one of bash, zsh, fish, not 'tcsh'\n"
