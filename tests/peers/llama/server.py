"""`python -m peers.llama.server`: llama-server with a GGUF file, alone or with its
own draft model, asked reply by reply over HTTP at the flags that are fastest here.

Flash attention, threads, and what it drafts at a time are tried with a few short replies, greedy
and sampled ones by themselves; what is not named is llama-server's default. Times are those that it
tells: of the prompt, to the first token, and of all tokens behind it. Standard library only. A line
of JSON asks, a line of JSON answers.
"""

import argparse
import itertools
import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.launch.chat.web import WebServer
from dovetail.launch.processes.child import claim_stdout, end_when_told, end_with
from dovetail.protocol.errors import DovetailError
from peers.llama.lines import Question, answer

CONTEXT_STEP = 2048
"""A context has room for a multiple of so many tokens: as much as the longest reply so far
needed."""
DRAFTED = (2, 4, 8, 16)
"""Numbers of tokens that its draft model proposes at most, of which the fastest is taken."""
SURE = (0.0, 0.75)
"""Probabilities below which it proposes no more: none, and what llama-server had for years."""
TRIAL_TOKENS = 24
POLL_S = 0.02
ASK_S = 3600.0
ENDED = "eos"
"""The reason for an end that is a token of the model."""


@dataclass(frozen=True)
class Flags:
    """Flags that are tried."""

    threads: int
    flash: str
    drafted: int = 0
    sure: float = 0.0

    def arguments(self, draft: str) -> list[str]:
        threads = str(self.threads)
        own = ["-t", threads, "-tb", threads, "-fa", self.flash]
        if not draft:
            return own
        speculation = ["--spec-draft-n-max", str(self.drafted), "--draft-p-min", str(self.sure)]
        speculation += ["--spec-type", "draft-simple"]
        return [*own, "-md", draft, "-td", threads, "-tbd", threads, "-devd", "none", *speculation]

    def __str__(self) -> str:
        said = f"-t {self.threads} -fa {self.flash}"
        more = f" --draft-max {self.drafted} --draft-p-min {self.sure:g}" if self.drafted else ""
        return said + more


class Server:
    """A process of llama-server that is started anew for other flags, or for a longer reply."""

    def __init__(self, program: str, file: str, draft: str, flags: Flags) -> None:
        self._program, self._file, self._draft = program, file, draft
        self.flags, self.room = flags, CONTEXT_STEP
        self._process: subprocess.Popen[bytes] | None = None
        self._running: tuple[Flags, int] | None = None
        self._port = 0
        self.peak_rss_bytes = 0

    def decode(
        self, tokens: Sequence[int], max_tokens: int, sampling: Mapping[str, Any], seed: int
    ) -> Mapping[str, Any]:
        """Return what llama-server tells of one reply."""
        needed = len(tokens) + max_tokens + 2 * max(DRAFTED)
        self.room = max(self.room, -(-needed // CONTEXT_STEP) * CONTEXT_STEP)
        if self._running != (self.flags, self.room):
            self._start()
        told = self._asked(
            "/completion",
            {
                "prompt": list(tokens),
                "n_predict": max_tokens,
                "seed": seed % (1 << 31),
                "samplers": ["top_k", "top_p", "min_p", "temperature"],
                "temperature": sampling["temp"],
                "repeat_penalty": 1.0,
                **{name: sampling[name] for name in ("top_k", "top_p", "min_p")},
                "cache_prompt": False,
                "return_tokens": True,
            },
        )
        assert self._process is not None
        self.peak_rss_bytes = max(self.peak_rss_bytes, peak_of(self._process.pid))
        return told

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        room = str(self.room)
        where = ["--host", "127.0.0.1", "--port", str(self._port), "--offline", "--no-ui"]
        how = ["-np", "1", "-c", room, "-dev", "none", "-fit", "off", "-cram", "0"]
        own = self.flags.arguments(self._draft)
        command = [self._program, "-m", self._file, *where, *how, *own]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, preexec_fn=partial(end_with, os.getpid())
        )
        self._running = (self.flags, self.room)
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"{' '.join(command)} ended with exit code {self._process.returncode}"
                )
            with suppress(DovetailError):
                if self._asked("/health", None).get("status") == "ok":
                    return
            time.sleep(POLL_S)

    def _asked(self, path: str, question: Mapping[str, Any] | None) -> Mapping[str, Any]:
        site = WebServer(f"http://127.0.0.1:{self._port}", "", silence_s=ASK_S)
        body = None if question is None else json.dumps(question).encode()
        with site.opened("GET" if body is None else "POST", path, body) as reply:
            content = reply.read()
        if reply.status == 200:
            found: Mapping[str, Any] = json.loads(content)
            return found
        if question is None:  # still loading
            return {}
        raise RuntimeError(content.decode(errors="replace")[:500])


class Opponent:
    """llama-server at its best flags, which may be others for greedy replies than for sampled
    ones."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._best: dict[bool, Flags] = {}
        self._drafted = 0

    def settle(self, asked: argparse.Namespace) -> None:
        """Find the flags: threads and flash attention first, then what is drafted."""
        for greedy in (True, False):
            ways = [replace(self._server.flags, threads=t, flash=f) for t, f in ways_of(asked)]
            best = self._fastest(ways, asked.trial, greedy=greedy)
            drafts = [replace(best, drafted=n, sure=p) for n, p in drafts_of(asked)]
            self._best[greedy] = self._fastest(drafts, asked.trial, greedy=greedy)
        if asked.draft and not self._drafted:
            raise RuntimeError(f"llama-server drafted nothing with {asked.draft}")

    def _fastest(self, every: Sequence[Flags], tokens: Sequence[int], *, greedy: bool) -> Flags:
        return min(every, key=lambda flags: self._try(flags, tokens, greedy=greedy))

    def _try(self, flags: Flags, tokens: Sequence[int], *, greedy: bool) -> float:
        """Milliseconds a token of a short reply, the second of two."""
        self._server.flags = flags
        sampling = {"temp": 0.0 if greedy else 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        for seed in range(2):
            told = self._server.decode(tokens, TRIAL_TOKENS, sampling, seed)
        timings = told["timings"]
        self._drafted += int(timings.get("draft_n", 0))
        taken, count = float(timings["predicted_ms"]), int(timings["predicted_n"])
        return taken / max(1, count)

    def decode(self, asked: Question) -> Mapping[str, Any]:
        """Return one reply as `lines.answer` tells it; llama-server tells the time of all passes,
        so that each is given the mean, and the threads are those that were fastest."""
        self._server.flags = self._best[asked.sampling["temp"] == 0.0]
        began = time.monotonic_ns()
        told = self._server.decode(asked.tokens, asked.max_tokens, asked.sampling, asked.seed)
        made = list(told["tokens"])
        if told.get("stop_type") == ENDED and (not made or made[-1] not in asked.ends):
            made.append(asked.ends[0])
        return {
            "tokens": made,
            "began_ns": began,
            "rounds": rounds_of(told["timings"], len(made), len(asked.tokens), began),
            "peak_rss_bytes": self._server.peak_rss_bytes,
        }

    @property
    def told(self) -> str:
        greedy, sampled = (str(self._best[way]) for way in (True, False))
        return greedy if greedy == sampled else f"{greedy}, sampled {sampled}"


def rounds_of(
    timings: Mapping[str, Any], made: int, prompt: int, began_ns: int
) -> list[tuple[int, int, int, int]]:
    """Passes as (when it ended, tokens committed, rows, nanoseconds), by the sums that llama-server
    tells of a reply."""
    first_ns, later_ns = (int(1e6 * timings[f"{part}_ms"]) for part in ("prompt", "predicted"))
    drafted, accepted = (int(timings.get(name, 0)) for name in ("draft_n", "draft_n_accepted"))
    rounds = [(began_ns + first_ns, 1, prompt, first_ns)]
    later = made - 1
    passes = max(1, later - accepted) if later else 0
    for index in range(passes):
        committed = later * (index + 1) // passes - later * index // passes
        rows = 1 + drafted * (index + 1) // passes - drafted * index // passes
        ended = began_ns + first_ns + later_ns * (index + 1) // passes
        rounds.append((ended, committed, rows, later_ns // passes))
    return rounds


def peak_of(process: int) -> int:
    """Return the most memory that a process ever held, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def ways_of(asked: argparse.Namespace) -> list[tuple[int, str]]:
    """Return numbers of threads and flash attention: what is named, or all that is tried."""
    threads = [asked.threads] if asked.threads else asked.tried
    return [*itertools.product(threads, [asked.flash] if asked.flash else ["on", "off"])]


def drafts_of(asked: argparse.Namespace) -> list[tuple[int, float]]:
    """Return how many tokens are drafted, and how sure the draft has to be of each."""
    if not asked.draft:
        return [(0, 0.0)]
    return [(asked.drafted, 0.0)] if asked.drafted else [*itertools.product(DRAFTED, SURE)]


def version_of(program: str) -> str:
    """The version that llama-server tells of itself."""
    told = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    said = (told.stderr + told.stdout).splitlines()
    return next((line for line in said if line.startswith("version")), "of an unknown version")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("file")
    parser.add_argument("--draft", default="")
    parser.add_argument("--cores", required=True)
    parser.add_argument("--tried", required=True, help="Numbers of threads, separated by commas.")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--flash", default="")
    parser.add_argument("--drafted", type=int, default=0)
    parser.add_argument("--trial", type=json.loads, required=True, help="Tokens of a prompt.")
    parser.add_argument("--parent", type=int, required=True)
    asked = parser.parse_args()
    asked.tried = [int(count) for count in asked.tried.split(",")]
    end_with(asked.parent)
    end_when_told()
    said = claim_stdout()
    os.sched_setaffinity(0, [int(core) for core in asked.cores.split(",")])
    (threads, flash), (drafted, sure) = ways_of(asked)[0], drafts_of(asked)[0]
    server = Server(asked.program, asked.file, asked.draft, Flags(threads, flash, drafted, sure))
    try:
        opponent = Opponent(server)
        opponent.settle(asked)
        engine = f"llama-server, {version_of(asked.program)}, {opponent.told}"
        print(json.dumps({"engine": engine}), file=said, flush=True)
        answer(said, opponent.decode)
    finally:
        server.close()


if __name__ == "__main__":
    main()
