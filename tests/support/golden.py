"""Representative messages and their golden bytes, by which two versions of the protocol are
compared.

`tests/protocol/golden/NAME.bin` holds the frames of one message, each behind its length (u32,
little-endian). A golden file changes only together with `messages.VERSION`; to write the files anew
after such a change, from the root of the repository:

    python tests/support/golden.py
"""

import importlib
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "protocol" / "golden"
PLACEMENT = "cpu 0-4, cuda:0 5-7 (1 resident, 2 streamed) and head"


def pack_frames(frames: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


def unpack_frames(content: bytes) -> list[bytes]:
    frames = []
    while content:
        (length,) = struct.unpack_from("<I", content)
        frames.append(content[4 : 4 + length])
        content = content[4 + length :]
    return frames


def representative() -> dict[str, Any]:
    """Name of the golden file -> a message that uses every field of its type."""
    m, array, settings, experts = (
        importlib.import_module(f"dovetail.protocol.{name}")
        for name in ("messages", "arrays", "settings", "experts")
    )
    facts = _facts(m, array.Array, settings, experts.Routing)
    return {
        **_introductions(m, facts),
        **_drafting(m, facts),
        **_verification(m, facts),
        **_requests(m, facts),
        **_replies(m, facts),
    }


def _facts(m: Any, array: Any, settings: Any, routing: Any) -> SimpleNamespace:
    """Return the values that several messages are made of."""
    sampling = settings.Sampling(
        temperature=0.7,
        top_k=50,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias=((11, -100.0), (9707, 2.5)),
        min_tokens=4,
        acceptance="rejection",
    )
    tree = settings.TreeSettings(
        policy="heterospec",
        gamma=6,
        depth=5,
        width=10,
        sharpening=0.5,
        thresholds=(0.5, 1.25),
        prune=(0.3, 0.6),
        adapt=("extend", "prune"),
    )
    return SimpleNamespace(
        array=array,
        sampling=sampling,
        constraint=m.Constraint(
            grammar='start: "yes" | "no"',
            thoughts=m.ThoughtBudget(tokens=512, open="<think>", close="</think>", begun=True),
            engine="llguidance 1.9.1",
            kind="json_schema",
            relaxed=('Unimplemented keys: ["not"]',),
        ),
        tree=tree,
        spans=(("verify", 1_000_000_000, 250_000), ("commit", 1_000_300_000, 90_000)),
        beside=(
            (3, 1, ("grow", 1_000_000_000, 250_000)),
            (None, None, ("send", 1_000_300_000, 90_000)),
        ),
        fingerprint=m.Fingerprint(
            checkpoint="0f" * 32,
            weights="fp32",
            kernels="torch 2.13 avx512 2 threads",
            split="",
            prefill="local",
            cache="half",
        ),
        vocabulary=m.VocabularyFacts(
            digest="ab" * 32,
            size=151936,
            end=(151643, 151645),
            begin=151643,
            template="{% for m in messages %}{{ m.content }}{% endfor %}",
        ),
        limits=m.Limits(
            context=4096,
            nodes=1024,
            sessions=8,
            kept=8192,
            prompt_rows=256,
            together=64,
            levels=7,
            room=65536,
            shares=True,
        ),
        tokenizer=array(dtype="uint8", shape=(2,), data=b"{}"),
        table=array(dtype="uint8", shape=(3,), data=b"\x00\x01\x02"),
        reads=m.Reads(
            taps=(2, 18, 33),
            width=4,
            dtype="bfloat16",
            vocabulary_size=151936,
            trained_for="1e" * 32,
        ),
        features=array(dtype="bfloat16", shape=(1, 12), data=bytes(range(24))),
        candidates=array(dtype="int32", shape=(4, 2), data=bytes(range(32))),
        probabilities=array(dtype="float32", shape=(4, 2), data=bytes(range(32, 64))),
        logprobs=m.TokenLogprobs(logprob=-0.25, top=((9707, -0.25), (11, -1.5))),
        rows_seconds=m.RowsSeconds(rows=(1, 16), seconds=(0.0625, 0.125)),
        experts=m.ExpertCosts(
            routing=routing(row=384, most=6144), expert_s=0.0000625, passes=((1, 384), (16, 3100))
        ),
    )


def _introductions(m: Any, facts: SimpleNamespace) -> dict[str, Any]:
    return {
        "hello": m.Hello(
            epoch=(1 << 63) - 1,
            roles=("target",),
            name="target-1",
            host="localhost",
            pid=4242,
            model="demo/target",
            device="cpu",
            threads=2,
            binding="full: cores 0-1, memory of node 0",
            kernels="AVX-512 VNNI",
            fingerprint=facts.fingerprint,
            limits=facts.limits,
            vocabulary=facts.vocabulary,
            tokenizer=facts.tokenizer,
            table=facts.table,
            states=m.States(width=4, layers=36, checkpoint="2d" * 32),
            reads=facts.reads,
            grammars="llguidance 1.9.1",
            looks_up=True,
            snapshots=True,
            cores=(0, 1),
            curves=(m.ContextCurve(context=512, t_v=facts.rows_seconds),),
            experts=facts.experts,
            weights="fp16",
            standby=True,
            placement=PLACEMENT,
            load_s=12.5,
            blocks=bytes(range(32)),
            served=77,
            held=(m.HeldSession(session=3, rows=17),),
        ),
        "hello-client": m.Hello(
            epoch=5, roles=("client",), name="client", host="localhost", pid=4243
        ),
        "loading": m.Loading(epoch=0, state=_loading(m)),
        "welcome": m.Welcome(epoch=1, keeps=(3,), journal=True),
        "failed": m.Failed(
            epoch=1, session=3, round=2, code="prefix", text="the log has 17 tokens, not 18"
        ),
        "probe": m.Probe(epoch=1, sent_ns=123_456_789),
        "probed": m.Probed(
            epoch=2,
            sent_ns=123_456_789,
            clock_ns=987_654_321,
            busy_ns=1_000,
            stale=1,
            sessions=2,
            rss_bytes=1 << 30,
            busy=True,
            beside=facts.beside,
        ),
        "observe": m.Observe(epoch=1, fine=True),
        "engage": m.Engage(epoch=1),
        "drain": m.Drain(epoch=1, dismissed=True),
    }


def _loading(m: Any) -> Any:
    return m.LoadingState(
        name="target-1",
        roles=("target",),
        host="localhost",
        pid=4242,
        model="demo/target",
        doing="checking",
        done=1 << 20,
        total=1 << 30,
        bytes_per_s=2.5e9,
    )


def _drafting(m: Any, facts: SimpleNamespace) -> dict[str, Any]:
    first = m.Draft(
        epoch=1,
        session=4,
        round=1,
        prefix=9,
        accepted=(),
        bonus=11,
        max_nodes=6,
        max_depth=5,
        max_width=10,
    )
    return {
        "feed": m.Feed(epoch=1, session=3, round=1, start=2, features=facts.features),
        "fed": m.Fed(epoch=3, session=3, round=1, start=2, spans=facts.spans),
        "draft": m.Draft(
            epoch=1,
            session=3,
            round=2,
            prefix=19,
            accepted=(0, 2),
            bonus=1879,
            max_nodes=6,
            max_depth=5,
            max_width=10,
            deadline_ms=12.5,
            more=(7,),
            rate=62.5,
            floor=0.03125,
            ahead=True,
            recalled=((5, 7, 11), (3, 7)),
            features=facts.array(dtype="bfloat16", shape=(4, 12), data=bytes(range(96))),
        ),
        "drafts": m.Drafts(
            epoch=1,
            orders=(first, first.model_copy(update={"session": 5, "round": 3})),
            rows=(0, 1),
            features=facts.features,
        ),
        "drafted": m.Drafted(
            epoch=3,
            session=3,
            round=2,
            tokens=(11, 13, 1879),
            parents=(-1, -1, 0),
            scores=(-0.25, -1.5, -2.0),
            grown=40,
            hit=True,
            ahead=20,
            wasted=10,
            passes=((1, 250_000), (10, 300_000)),
            entropy=1.5,
            spans=facts.spans,
            beside=facts.beside,
            candidates=facts.candidates,
            probabilities=facts.probabilities,
        ),
    }


def _verification(m: Any, facts: SimpleNamespace) -> dict[str, Any]:
    item = m.VerifyItem(session=3, round=2, prefix=18, tokens=(11, 13, 1879), parents=(-1, -1, 0))
    part = m.ReadItem(session=4, round=1, start=1, rows=64)
    verdict = m.VerifiedItem(
        session=3,
        round=2,
        accepted=(0, 2),
        bonus=0,
        margins=(0.5, 0.125, 3.0),
        logprobs=(facts.logprobs,) * 3,
    )
    return {
        "open": m.Open(
            epoch=1,
            session=3,
            round=1,
            key=bytes(range(16)),
            prompt=(151644, 872, 198),
            capacity=515,
            vocabulary_size=151936,
            end=(151643, 151645),
            sampling=facts.sampling,
            constraint=facts.constraint,
            tree=facts.tree,
            features=facts.reads,
            base=2,
            shared=True,
            kept=1,
            scope=bytes(range(32)),
            logprobs=2,
            scored=True,
            replied=1,
            features_from=2,
            read=1,
        ),
        "read": m.Read(epoch=1, item=part),
        "reading": m.Reading(epoch=2, session=3, round=1, done=2, spans=facts.spans),
        "prefilled": m.Prefilled(epoch=2, session=3, round=2, start=2, features=facts.features),
        "refeed": m.Refeed(
            epoch=1, session=3, round=2, start=2, prefix=18, features=facts.reads, read=4
        ),
        "refed": m.Refed(epoch=2, session=3, round=2, spans=facts.spans),
        "scored": m.Scored(
            epoch=2, session=3, round=1, start=1, logprobs=(facts.logprobs, facts.logprobs)
        ),
        "opened": m.Opened(
            epoch=2,
            session=3,
            round=1,
            bonus=9707,
            margin=0.25,
            logprobs=facts.logprobs,
            spans=facts.spans,
            placement=PLACEMENT,
            restored="disk",
            read_by="cuda:0",
        ),
        "verify": m.Verify(
            epoch=1,
            items=(item,),
            candidates=facts.candidates,
            probabilities=facts.probabilities,
            reads=(part,),
        ),
        "verified": m.Verified(
            epoch=2,
            items=(verdict,),
            experts=1536,
            spans=facts.spans,
            beside=facts.beside,
            features=facts.array(dtype="bfloat16", shape=(3, 12), data=bytes(range(72))),
        ),
        "close": m.Close(epoch=1, session=3, keep=True),
        "closed": m.Closed(epoch=2, session=3),
        "blocks": m.Blocks(epoch=2, names=bytes(range(64)), stored=True, damaged=1),
    }


def _requests(m: Any, facts: SimpleNamespace) -> dict[str, Any]:
    return {
        "submit": m.Submit(
            epoch=5,
            request=9,
            tokens=(1, 2),
            text="plain",
            turns=("Hi", "Hello.", "More"),
            sampling=facts.sampling,
            constraint=facts.constraint,
            max_tokens=512,
            stop=("\n\n",),
            seed=7,
            sample=1,
            owner="ab" * 32,
            salt="tenant 7",
            end=(151643,),
            vocabulary="ab" * 32,
            logprobs=2,
            scored=True,
            tree=facts.tree,
            speculate=False,
            trace=True,
            record=True,
            progress=True,
            ahead=False,
            ticket="chatcmpl-0123456789abcdef/0",
            memo=b"{}",
            told=m.Told(tokens=3, characters=14, scores=1, fingerprint="0123456789ab"),
            again=True,
        ),
        "recall": m.Recall(epoch=5, request=9, ticket="chatcmpl-0123456789abcdef/0", owner="alice"),
        "recalled": m.Recalled(epoch=1, request=9, memo=b"{}"),
        "forget": m.Forget(epoch=5, request=9, owner="alice"),
        "forgotten": m.Forgotten(epoch=1, request=9, found=True),
        "cancel": m.Cancel(epoch=5, request=9),
        "status": m.Status(epoch=5),
        "describe": m.Describe(epoch=5),
        "look": m.Look(epoch=5, request=9, after=4096, spans=True),
        "swap": m.Swap(epoch=5, request=9, newcomer=78, old=77),
        "dismiss": m.Dismiss(epoch=5, request=9, worker=77, last=True),
        "stop": m.Stop(epoch=5),
    }


def _replies(m: Any, facts: SimpleNamespace) -> dict[str, Any]:
    return {
        "emitted": m.Emitted(
            epoch=1,
            request=9,
            tokens=(9707, 11),
            drafted=(True, False),
            text="Hello,",
            logprobs=(facts.logprobs, facts.logprobs),
            fingerprint="0123456789ab",
        ),
        "prompt_read": m.PromptRead(epoch=1, request=9, total=12000, cached=5000, done=8200),
        "prompt_scored": m.PromptScored(epoch=1, request=9, start=1, logprobs=(facts.logprobs,)),
        "recorded": m.Recorded(epoch=1, request=9, record=_record(m)),
        "finished": m.Finished(
            epoch=1,
            request=9,
            result=_result(m, facts),
            margins=(0.5, 0.25, 1.0),
            spans=(_seen_span(m, facts),),
        ),
        "described": m.Described(
            epoch=1,
            model="demo/target",
            fingerprint=str(facts.fingerprint),
            limits=facts.limits,
            vocabulary=facts.vocabulary,
            tokenizer=facts.tokenizer,
            table=facts.table,
            grammars="llguidance 1.9.1",
        ),
        "seen": _seen(m, facts),
        "progressed": m.Progressed(epoch=1, request=9, text="draft-2 is tried"),
        "swapped": m.Swapped(epoch=1, request=9, moved=7, stayed=1, longest_pause_s=0.0625),
        "dismissed": m.Dismissed(epoch=1, request=9, moved=7, stayed=1, longest_pause_s=0.0625),
        "reported": _reported(m, facts),
    }


def _seen(m: Any, facts: SimpleNamespace) -> Any:
    worker = m.SeenWorker(
        name="target-1",
        worker_epoch=77,
        roles=("target",),
        host="localhost",
        device="cpu",
        cores=(0, 1),
        node="0",
        busy_ns=9_000_000,
        at_ns=1_000_200_000,
        clock_bound_ns=52_000,
        waiting="draft",
    )
    return m.Seen(
        epoch=1,
        request=9,
        at_ns=1_000_500_000,
        next=4098,
        missed=7,
        more=True,
        workers=(worker,),
        rounds=(
            m.SeenRound(
                number=4097,
                session=3,
                draft="draft-1",
                target="target-1",
                at_ns=1_000_400_000,
                readable=False,
                record=_record(m),
            ),
        ),
        spans=(_seen_span(m, facts),),
    )


def _seen_span(m: Any, facts: SimpleNamespace) -> Any:
    return m.SeenSpan(
        process="target-1",
        device="cpu",
        session=3,
        round=2,
        shared=((3, 2), (4, 7)),
        span=facts.spans[0],
    )


def _record(m: Any) -> Any:
    return m.RoundRecord(
        round=2,
        prefix=18,
        tokens=(11, 13, 1879),
        parents=(-1, -1, 0),
        scores=(-0.25, -1.5, -2.0),
        verified=2,
        accepted=(0,),
        bonus=1879,
        committed=1,
        entropy=1.5,
        hit=True,
        grown=40,
        ahead=20,
        wasted=10,
        passes=((1, 250_000), (10, 300_000)),
        draft_ns=500_000,
        verify_ns=9_000_000,
        experts=1536,
        transport_ns=100_000,
        queue_ns=1,
        coordinator_ns=150_000,
    )


def _result(m: Any, facts: SimpleNamespace) -> Any:
    return m.Result(
        text="Hello, wörld 世界",
        token_ids=(9707, 11, 1879),
        prompt_tokens=5,
        completion_tokens=3,
        finish_reason="stop",
        seed=(1 << 63) - 1,
        fingerprint=str(facts.fingerprint),
        rounds=2,
        tau=1.0,
        accepted_tokens=1,
        drafted_tokens=12,
        grown_nodes=40,
        acceptance_rate=0.5,
        accepted_per_position=(0.5, 0.0),
        hit_rate=None,
        wall_s=0.25,
        time_to_first_token_s=0.125,
        tokens_per_s=12.0,
        prefill_s=0.1,
        draft_exposed_s=0.02,
        verify_s=0.1,
        transport_s=0.001,
        queue_s=0.0,
        coordinator_s=0.002,
        unaccounted_s=0.027,
        bytes_per_round=412.5,
        ahead_nodes=64,
        wasted_nodes=30,
        verified_rows=14,
        plain_rounds=2,
        control_rounds=1,
        predicted_tokens_per_s=11.5,
        reused_tokens=4,
        reused_from="memory",
        moves=1,
        fingerprints=("another", str(facts.fingerprint)),
        placement=PLACEMENT,
        prefill="cuda:0",
        draft_failure=m.DraftFailure(
            draft="draft", error="IndexError: index 7 is out of bounds", round=2, after_s=0.25
        ),
        constraint=m.Followed(
            kind="regex", engine="llguidance 1.9.1", relaxed=("pattern a",), complete=True
        ),
    )


def _reported(m: Any, facts: SimpleNamespace) -> Any:
    return m.Reported(
        epoch=1,
        address="ipc:///run/user/1000/dovetail/coordinator",
        pid=4241,
        uptime_s=12.5,
        workers=(_worker_state(m, facts),),
        sessions=1,
        finished=2,
        failed=0,
        cancelled=1,
        rounds=40,
        tau=3.5,
        stale=0,
        refused=0,
        degraded=True,
        reasons=("there is no draft worker",),
        faults=(
            m.Fault(
                part="draft worker",
                why="it was killed by SIGKILL",
                since_s=3.5,
                retry_s=0.5,
                restarts=True,
            ),
        ),
        loading=(_loading(m),),
        processes=(
            m.ProcessState(name="coordinator", host="here", pid=4241, cpu_s=1.25, rss_mb=61.5),
        ),
        pairs=(_pair_state(m, facts),),
        decisions=(
            "session 3: no speculation from token 57 on, it makes 55 tokens/s and the target "
            "alone 60",
        ),
        totals=m.Totals(
            prompt_tokens=300,
            reused_tokens=120,
            completion_tokens=140,
            drafts=38,
            drafted_tokens=500,
            accepted_tokens=98,
            accepted_per_depth=(30, 20, 10),
            reasons=(("stop", 1), ("length", 1), ("cancelled", 1)),
            refused_requests=2,
            opening=1,
            waiting=1,
            queue=(m.KeyWaits(key="0123abcd", length=2, longest_s=1.5, lacks="key"),),
            queued=2,
            moves=2,
            rebalanced=1,
            let_go=1,
            kept=2,
            occupied=0.125,
            draft_failures=3,
        ),
        drained=("draft",),
        journal=m.JournalState(
            folder="/home/alice/.local/state/dovetail/journals/0123456789abcdef",
            bytes=4096,
            replies=2,
            write_us=11.5,
            sync_ms=1.5,
            failed="no space left on device",
        ),
    )


def _worker_state(m: Any, facts: SimpleNamespace) -> Any:
    return m.WorkerState(
        name="target-1",
        roles=("target",),
        model="demo/target",
        device="cpu",
        threads=2,
        binding="full: cores 0-1, memory of node 0",
        kernels="AVX-512 VNNI",
        placement=PLACEMENT,
        fingerprint=str(facts.fingerprint),
        host="localhost",
        pid=4242,
        worker_epoch=77,
        sessions=1,
        busy_share=0.75,
        round_trip_us=104.5,
        clock_offset_us=-3.25,
        clock_bound_us=52.0,
        rss_mb=812.5,
        stale=0,
        weights="fp16",
        standby=True,
        swapped_in=True,
        leaving=True,
        stuck=True,
        sent_bytes=40_000,
        received_bytes=50_000,
        bytes_per_round=312.5,
        feature_bytes=512,
        t_v=m.RowsSeconds(rows=(1, 2, 64), seconds=(0.02, 0.021, 0.05)),
        token_s=0.03,
        rows=2.5,
        row_s=0.0005,
        sharing=1.5,
        ends=("<eos>", "<end_of_turn>"),
        grammars="llguidance 1.9.1",
        blocks=3,
        damaged_blocks=1,
    )


def _pair_state(m: Any, facts: SimpleNamespace) -> Any:
    return m.PairState(
        draft="draft-1",
        target="target-1",
        speculating=True,
        undrafted="1 session is decoded without a draft: it does not pay",
        rounds=40,
        hit_rate=0.5,
        gamma=9.5,
        tokens_per_s=31.0,
        alone_tokens_per_s=15.0,
        predicted_tokens_per_s=32.0,
        hops_us=180.0,
        t_v=facts.rows_seconds,
        t_d=facts.rows_seconds,
    )


def write_all() -> None:
    codec = importlib.import_module("dovetail.protocol.codec")
    FOLDER.mkdir(exist_ok=True)
    for name, message in representative().items():
        (FOLDER / f"{name}.bin").write_bytes(pack_frames(codec.encode(message)))


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # gives a bare checkout its import name, as conftest.py does for the tests
        (Path(folder) / "dovetail").symlink_to(FOLDER.parents[2], target_is_directory=True)
        sys.path.insert(0, folder)
        write_all()


def a_worker(name: str, pid: int, **fields: Any) -> Any:
    """Return the state of a serving worker of this name, without a model."""
    own = {"name": name, "pid": pid, "worker_epoch": pid, "model": "", "fingerprint": "", **fields}
    serves = dict.fromkeys(("standby", "swapped_in", "leaving", "stuck"), False)
    return representative()["reported"].workers[0].model_copy(update={**serves, **own})
