"""llama.cpp as a peer of `dovetail bench`; what needs it is tried where it is installed, in this
environment or in that of LLAMA_PYTHON."""

import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.bench.contenders import check_methods
from dovetail.launch.bench.figures import differences_told
from dovetail.launch.bench.methods import PromptSet, read_method
from dovetail.launch.bench.turns import Cell
from dovetail.launch.machine.cores import CoreLayout, lay_out_here
from dovetail.launch.machine.topology import Place
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import Configuration, configure
from dovetail.protocol.errors import SettingsError, UserError
from dovetail.protocol.settings import Sampling
from dovetail.runtime.session.comparison import NEAR_TIE, Difference
from peers.llama.peer import LlamaOptions, LlamaPeer, Preparation, read_option
from peers.llama.start import find_python
from support.models import tiny_qwen2

RunCommand = Callable[..., subprocess.CompletedProcess[str]]
NAMED = os.environ.get("LLAMA_PYTHON")
PYTHON = find_python(Path(NAMED) if NAMED else None)
installed = pytest.mark.skipif(
    PYTHON is None,
    reason="llama-cpp-python and gguf are not installed here: name a Python that has them in "
    "LLAMA_PYTHON",
)
TURNS = ["Tell me a story about a small owl who is afraid of the dark."]
LAYOUT = CoreLayout(Place((0,)), Place((1,)), Place((1,)))


def base(**settings: Any) -> Configuration:
    return configure(environment={}).over(
        "--test", {name.replace("__", "."): value for name, value in settings.items()}
    )


def test_its_options_and_our_settings_are_appended_to_its_name() -> None:
    method = read_method(
        base(), "llama.cpp,threads=2,draft=lookup,lookup=4,target.weights=half,cache=f32"
    )
    assert method.options == LlamaOptions(threads=2, draft="lookup", lookup=4, cache="f32")
    assert (method.options.proposed, LlamaOptions().proposed) == (4, 0)
    assert (method.ours, method.exact, method.weights) == (False, False, "F16")
    assert read_option(LlamaOptions(), "tree.gamma=3") is None


@pytest.mark.parametrize(
    "option", ["threads=0", "threads=x", "draft=small", "cache=q8", "lookup=-1"]
)
def test_an_option_that_is_not_possible_is_refused_with_those_that_are(option: str) -> None:
    with pytest.raises(UserError, match=r"write threads=N, draft=lookup"):
        read_method(base(), f"llama.cpp,{option}")


def test_a_setting_that_there_is_not_is_refused_as_anywhere() -> None:
    with pytest.raises(SettingsError, match="there is no setting 'flash'"):
        read_method(base(), "llama.cpp,flash=1")


def test_what_it_would_not_do_as_we_do_is_refused_before_a_process_is_started(
    tmp_path: Path,
) -> None:
    def check(text: str, **settings: Any) -> None:
        check_methods([read_method(base(**settings), text)], LAYOUT)

    check("llama.cpp,threads=2")
    with pytest.raises(UserError, match="threads=3 are more than the 2 cores"):
        check("llama.cpp,threads=3")
    with pytest.raises(UserError, match=r"--method llama\.cpp takes temperature"):
        check("llama.cpp,threads=1", sampling__presence_penalty=0.5)
    with pytest.raises(UserError, match="has a model of type 'qwen2'"):
        check("llama.cpp", target__model=str(tiny_qwen2(tmp_path)))


def test_where_it_is_not_installed_one_line_says_so_and_how_to_get_it(
    invoke: RunCommand, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    missing = invoke("bench", "--method", "llama.cpp", "--llama-python", str(python))
    assert (missing.returncode, missing.stdout, missing.stderr.count("\n")) == (2, "", 1)
    assert f"--llama-python {python} is not there" in missing.stderr
    python.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    python.chmod(0o700)
    done = invoke("bench", "--method", "llama.cpp", "--llama-python", str(python))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "llama-cpp-python is not installed" in line
    assert "pip install llama-cpp-python gguf" in line
    assert "--llama-python" in line


def test_its_differences_are_told_with_their_margin_and_are_no_fault_of_ours() -> None:
    told = []
    for name in ("llama.cpp", "assisted"):
        cell = Cell(read_method(base(), name), PromptSet("set", ()), 0.0)
        cell.differences["a"] = Difference(7, 0.02)
        told += differences_told([cell])
    assert [
        (each["method"], each["position"], each["margin"], each["near_tie"], each["exact"])
        for each in told
    ] == [("llama.cpp", 7, 0.02, False, False), ("assisted", 7, 0.02, False, True)]


@pytest.fixture(scope="module")
def preparation() -> Iterator[Preparation]:
    assert PYTHON is not None
    with Supervisor() as supervisor:
        yield Preparation(supervisor, PYTHON)


def tokens(peer: LlamaPeer, *, seed: int = 0, temperature: float = 0.0) -> tuple[int, ...]:
    reply = peer.decode(
        TURNS, sampling=Sampling(temperature=temperature), max_tokens=24, seed=seed, threads=1
    )
    return reply.result.token_ids


@installed
@pytest.mark.slow
def test_it_says_what_the_target_says_with_its_lookup_or_without(preparation: Preparation) -> None:
    from support.stacks import started

    ways = (
        LlamaOptions(threads=1),
        LlamaOptions(threads=1, draft="lookup"),
        LlamaOptions(threads=1, cache="f32"),
    )
    said = [tokens(LlamaPeer(preparation, base(), lay_out_here(), options)) for options in ways]
    with started({"draft.kind": "none"}) as (stack, _), stack.connect() as client:
        client.submit(turns=TURNS, sampling=Sampling(), max_tokens=24, seed=0, speculate=False)
        finished = next(reply for reply in client.replies(60.0) if hasattr(reply, "result"))
    for ours in said:
        parted = next(
            (
                i
                for i, (a, b) in enumerate(zip(ours, finished.result.token_ids, strict=True))
                if a != b
            ),
            None,
        )
        assert parted is None or finished.margins[parted] < 100 * NEAR_TIE, f"token {parted}"


@installed
@pytest.mark.slow
def test_a_seed_gives_the_same_reply_again_and_what_it_cannot_do_is_told(
    preparation: Preparation,
) -> None:
    peer = LlamaPeer(preparation, base(), lay_out_here(), LlamaOptions(threads=1))
    assert tokens(peer, seed=5, temperature=1.0) == tokens(peer, seed=5, temperature=1.0)
    with pytest.raises(Exception, match=r"llama\.cpp: "):
        peer.decode(TURNS, sampling=Sampling(), max_tokens=4, seed=0, threads="two")  # type: ignore[arg-type]
    assert len(tokens(peer)) == 24


@installed
@pytest.mark.slow
def test_it_takes_its_turns_in_a_run(run: RunCommand, tmp_path: Path) -> None:
    options = (
        "--llama-python",
        str(PYTHON),
        *shlex.split("--limit 2 --max-tokens 16 --draft.device cpu --plot"),
        str(tmp_path / "bars.svg"),
    )
    done = run("bench", "--method", "llama.cpp,threads=1", *options)
    assert done.returncode == 0, done.stderr
    assert "llama.cpp,threads=1" in done.stdout
    assert "times as fast as llama.cpp,threads=1" in done.stderr
    assert "llama.cpp" in (tmp_path / "bars.svg").read_text()
