"""A session that begins with stored blocks is, byte for byte, one that reads its whole prompt."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import VerifyItem
from dovetail.protocol.prefixes import BLOCK_TOKENS, NAME_BYTES, names_of
from dovetail.protocol.settings import CacheSettings, Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.runtime.fleet.block_index import BlockIndex
from dovetail.workers.drafters.model import Drafter
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.sessions.block_files import BlockFiles
from dovetail.workers.sessions.blocks import BlockStore
from dovetail.workers.sessions.opening import open_blocks
from dovetail.workers.sessions.results import First, Verdict
from dovetail.workers.verifier import Verifier
from support.architectures import VARIED, write_tiny
from support.kernels import needs_kernels
from support.models import VOCABULARY, cache_row, tiny_gemma2, tiny_llama
from support.opening import opening as order

CONTEXT = 512
MUCH = 1 << 30
MINE, YOURS = b"m" * 32, b"y" * 32
WARM, TREE = Sampling(temperature=1.2, top_p=0.95), TreeSettings(policy="dynamic", gamma=4, depth=2)
MODELS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "fp32": (tiny_llama, {}),
    "half": (tiny_llama, {"cache": "half"}),
    "q8": (tiny_llama, {"cache": "q8"}),
    "windows": (tiny_gemma2, {}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    make, more = MODELS[request.param]
    folder = make(tmp_path_factory.mktemp(request.param), context=CONTEXT)
    return load_language_model(str(folder), weights="fp32", device="cpu", backend="kernels", **more)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tiny_llama(tmp_path_factory.mktemp("plain"), context=CONTEXT)
    return load_language_model(str(folder), weights="fp32", device="cpu")


def random_tokens(count: int, seed: int = 0, most: int = VOCABULARY) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(2, most) for _ in range(count))


def chunks(names: bytes) -> Sequence[bytes]:
    """The names in a report."""
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


PROMPT = random_tokens(3 * BLOCK_TOKENS + 5)


def store_of(
    model: LanguageModel, folder: Path | None = None, *, memory: int = MUCH, disk: int = MUCH
) -> BlockStore:
    files = None if folder is None else BlockFiles(folder, disk, "target")
    return BlockStore(b"seed", model.new_cache, memory, files)


def target(model: LanguageModel, store: BlockStore | None = None) -> Verifier:
    return Verifier(model, Spans(), kept_tokens=4000, blocks=store)


def turn(
    verifier: Verifier,
    number: int,
    prompt: Sequence[int],
    *,
    kept: int = 0,
    scope: bytes = MINE,
    step: int | None = None,
) -> tuple[Any, ...]:
    """Return the source of the first rows, and the numbers and rows of a session of two rounds.
    `step`: rows of a chunk of the prompt."""
    fields = {"key": bytes(15) + b"1", "capacity": CONTEXT, "sampling": WARM, "tree": TREE}
    command = order(number, prompt, kept=kept, scope=scope, logprobs=2, read=step, **fields)
    *_, first = verifier.open(command)
    while not isinstance(first, First):
        *_, first = verifier._read(number, verifier._begun[number], step)
    numbers: list[Any] = [(first.token, first.margin, first.logprobs)]
    for round_ in (1, 2):
        prefix = len(verifier._sessions[number].log)
        item = VerifyItem(
            session=number, round=round_, prefix=prefix, tokens=(3, 4, 5), parents=(-1, -1, 0)
        )
        (verdict,) = verifier.verify([item])
        assert isinstance(verdict, Verdict)
        numbers.append(verdict.item)
    cache = verifier._sessions[number].cache
    rows = torch.stack([cache_row(cache, slot) for slot in range(cache.length)])
    return first.restored, numbers, rows


def assert_equal(found: tuple[Any, ...], fresh: tuple[Any, ...], source: str) -> None:
    assert (found[0], fresh[0]) == (source, "")
    assert str(found[1]) == str(fresh[1])
    assert torch.equal(found[2], fresh[2])


@needs_kernels
@pytest.mark.parametrize("step", [None, 40])
@pytest.mark.parametrize("kept", [64, 192, 150, 100])
def test_sessions_that_fork_from_blocks_are_the_same_bytes_also_within_a_block(
    model: LanguageModel, kept: int, step: int | None
) -> None:
    storing, fresh = target(model, store_of(model)), target(model)
    turn(storing, 1, PROMPT, step=step)  # still open
    whole = kept // BLOCK_TOKENS * BLOCK_TOKENS
    fork = (*PROMPT[:whole], *random_tokens(30, seed=1))
    for number, (prompt, rows) in enumerate(((PROMPT, kept), (fork, whole)), 2):
        found = turn(storing, number, prompt, kept=rows)
        assert_equal(found, turn(fresh, number, prompt, scope=b""), "memory")


@needs_kernels
def test_blocks_on_disk_outlive_their_worker_and_are_the_same_bytes(
    model: LanguageModel, tmp_path: Path
) -> None:
    folder = tmp_path / "prompts" / "seed"
    first = store_of(model, folder)
    before = target(model, first)
    turn(before, 1, PROMPT)
    turn(before, 2, PROMPT, kept=192)  # used again: worth writing
    while first.idle():
        pass
    assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent)} == {0o700}
    assert len([*folder.iterdir()]) == 3
    after = target(model, store_of(model, folder))
    for number, source in ((1, "disk"), (2, "memory")):
        found = turn(after, number, (*PROMPT, 7), kept=192)
        assert_equal(found, turn(target(model), number, (*PROMPT, 7)), source)


@needs_kernels
def test_the_rows_of_a_reply_are_stored_at_its_end_and_those_of_a_cancelled_prompt_at_once(
    plain: LanguageModel,
) -> None:
    store = store_of(plain)
    verifier, prompt = target(plain, store), random_tokens(BLOCK_TOKENS - 2)
    turn(verifier, 1, prompt)
    log = verifier._sessions[1].log
    assert [*store.begin(1), *store.news()] == [*store.seed]
    verifier.close(1, keep=True)
    (blocks,) = store.news()
    assert blocks.names == names_of(store.seed, MINE, _packed(log), 0)[0]
    fields = {"capacity": CONTEXT, "sampling": WARM, "tree": TREE, "scope": MINE, "read": 70}
    [*verifier.open(order(2, PROMPT, **fields))]
    verifier.close(2)
    found = turn(verifier, 3, PROMPT, kept=64)
    assert_equal(found, turn(target(plain), 3, PROMPT, scope=b""), "memory")


@needs_kernels
def test_a_block_serves_its_scope_and_its_seed_only(plain: LanguageModel) -> None:
    store = store_of(plain)
    verifier = target(plain, store)
    turn(verifier, 1, PROMPT)
    assert turn(verifier, 2, PROMPT, kept=192)[0] == "memory"
    with pytest.raises(RequestError, match="rows from 0 on are not stored") as refusal:
        turn(verifier, 3, PROMPT, kept=192, scope=YOURS)
    assert refusal.value.code == "prefix"
    turn(verifier, 4, PROMPT, scope=b"")
    assert len(store._held) == 3
    mine = names_of(b"one", MINE, _packed(PROMPT), 0)
    assert not {*mine} & {*names_of(b"two", MINE, _packed(PROMPT), 0)}
    assert {len(name) for name in mine} == {NAME_BYTES}


@needs_kernels
@pytest.mark.parametrize("damage", ["flipped", "cut", "other", "gone"])
def test_a_damaged_file_is_deleted_and_the_prompt_is_read(
    plain: LanguageModel, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = store_of(plain, tmp_path / "prompts" / "seed")
    verifier = target(plain, store)
    turn(verifier, 1, PROMPT)
    turn(verifier, 2, PROMPT, kept=192)
    while store.idle():
        pass
    names = names_of(store.seed, MINE, _packed(PROMPT), 0)
    first, second = (tmp_path / "prompts" / "seed" / f"{n.hex()}.safetensors" for n in names[:2])
    content = bytearray(second.read_bytes())
    match damage:
        case "flipped":
            content[-9] ^= 1
            second.write_bytes(content)
        case "cut":
            second.write_bytes(content[:-9])
        case "other":
            second.write_bytes(first.read_bytes())
        case "gone":
            second.unlink()
    files = BlockFiles(tmp_path / "prompts" / "seed", MUCH, "target")
    again = BlockStore(b"seed", plain.new_cache, MUCH, files)
    again.begin(1)
    assert sum(len(report.names) for report in again.news()) == (2 if damage == "gone" else 3) * 32
    after = target(plain, again)
    with pytest.raises(RequestError, match="rows from 64 on are not stored"):
        turn(after, 1, PROMPT, kept=192)
    assert not second.exists()
    assert files.damaged == (damage != "gone")
    assert ("is damaged: it is deleted" in capsys.readouterr().err) == (damage != "gone")
    gone = {(report.stored, report.damaged): {*chunks(report.names)} for report in again.news()}
    assert gone == {(False, int(damage != "gone")): {*names[1 + (damage == "gone") : 3]}}
    turn(after, 3, PROMPT)  # what is behind the damaged block is stored again, too
    assert turn(after, 4, PROMPT, kept=192)[0] == "memory"
    while again.idle():
        pass
    assert {path.stem for path in second.parent.iterdir()} == {name.hex() for name in names[:3]}
    assert turn(after, 2, PROMPT, kept=64)[0] == "memory"


@needs_kernels
def test_beyond_its_bounds_the_least_recently_used_go_and_of_a_prompt_the_last(
    plain: LanguageModel, tmp_path: Path
) -> None:
    size = plain.new_cache(0).row_bytes * BLOCK_TOKENS
    folder = tmp_path / "prompts" / "seed"
    store = store_of(plain, folder, memory=4 * size, disk=4 * (size + 4096))
    verifier, other = target(plain, store), random_tokens(2 * BLOCK_TOKENS + 1, seed=9)
    store.begin(1)
    for number, prompt in enumerate((PROMPT, other), 1):
        turn(verifier, number, prompt)
        turn(verifier, 10 + number, prompt, kept=64)
        while store.idle():
            pass
    mine, others = (names_of(store.seed, MINE, _packed(prompt), 0) for prompt in (PROMPT, other))
    assert {*store._held} == {*mine[:2], *others}
    assert len([*folder.iterdir()]) <= 4
    written = {bytes.fromhex(path.stem) for path in folder.iterdir()}
    assert {mine[0], *others} <= written
    told = {name for report in store.news() if report.stored for name in _names(report.names)}
    assert told == {*store._held} | written


@needs_kernels
def test_a_disk_that_refuses_stops_the_writing_and_nothing_else(
    plain: LanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "prompts" / "seed"
    store = store_of(plain, folder)
    verifier = target(plain, store)
    turn(verifier, 1, PROMPT)
    folder.rmdir()
    folder.write_text("a file in its place")
    turn(verifier, 2, PROMPT, kept=64)
    while store.idle():
        pass
    assert capsys.readouterr().err.count("prompts are no longer cached in") == 1
    assert turn(verifier, 3, PROMPT, kept=192)[0] == "memory"


def test_a_small_draft_proposes_the_same_from_blocks(plain: LanguageModel) -> None:
    store = store_of(plain)
    engine, fields = Drafter(plain, Spans()), {"capacity": CONTEXT, "tree": TREE, "sampling": WARM}
    session = engine.open(order(1, PROMPT, **fields))
    left = engine.left(session)
    store.chain(MINE).extend(left.log, left.cache, left.whole)
    command = order(2, PROMPT, kept=192, scope=MINE, **fields)
    cache, source = store.restore(command)
    restored = engine.open(command, engine.restored(list(PROMPT[:192]), cache))
    assert (source, restored.cache.length) == ("memory", len(PROMPT))
    for slot in range(len(PROMPT)):
        assert torch.equal(cache_row(restored.cache, slot), cache_row(session.cache, slot))


@needs_kernels
@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1", "lfm2", "nemotron_h"])
@pytest.mark.parametrize("step", [None, 40])
def test_a_model_with_states_goes_on_behind_the_last_whole_block_of_a_prompt(
    kind: str, step: int | None, tmp_path: Path
) -> None:
    write_tiny(kind, tmp_path / "model", **(VARIED[kind] | {"max_position_embeddings": CONTEXT}))
    model = load_language_model(
        str(tmp_path / "model"), weights="fp32", device="cpu", backend="kernels"
    )
    store = store_of(model, tmp_path / "prompts" / "seed")
    before, prompt = target(model, store), random_tokens(5 * BLOCK_TOKENS + 30, 2, most=40)
    turn(before, 1, prompt, step=step)
    while store.idle():
        pass
    longer = (*prompt, *random_tokens(9, 3, most=40))
    wanted, again = turn(target(model), 2, longer), turn(target(model), 3, prompt)
    disk = store_of(model, tmp_path / "prompts" / "seed")
    for blocks, source in ((store, "memory"), (disk, "disk")):
        after = target(model, blocks)
        assert_equal(turn(after, 2, longer, kept=5 * BLOCK_TOKENS, step=step), wanted, source)
        assert_equal(turn(after, 3, prompt, kept=5 * BLOCK_TOKENS), again, "memory")
        for kept in (4 * BLOCK_TOKENS, 5 * BLOCK_TOKENS - 3):
            with pytest.raises(RequestError, match="states after them are not stored"):
                turn(after, 4, longer, kept=kept)
        index = BlockIndex(blocks.begin(1), snapshots=blocks.snapshots)
        for report in blocks.news():
            index.note(report.names, stored=report.stored)
        found = index.find(MINE, _packed(longer))
        assert found is not None
        assert found.tokens == 5 * BLOCK_TOKENS
        assert index.find(MINE, _packed(prompt[: 5 * BLOCK_TOKENS])) is None


def test_without_memory_or_where_states_hold_all_rows_nothing_is_stored(
    plain: LanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    device = torch.device("cpu")
    for value, stored in (("0", False), ("1MB", True)):
        settings = CacheSettings(memory=value)
        assert bool(open_blocks(settings, "target", "", plain.new_cache, device)) == stored

    class WithStates(type(plain.new_cache(0))):  # type: ignore[misc]
        base_bytes = 1

    settings = CacheSettings(memory="1MB", disk="1GB")
    assert open_blocks(settings, "t", "", lambda n: WithStates(**_size(n)), device) is None
    reason = "the rows of this model cannot be stored"
    assert capsys.readouterr().err == f"t: no prompts are cached on disk: {reason}\n"


def _size(capacity: int) -> dict[str, Any]:
    return {"layers": 1, "kv_heads": 1, "head_dim": 16, "capacity": capacity}


def _packed(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def _names(joined: bytes) -> list[bytes]:
    return [joined[at : at + NAME_BYTES] for at in range(0, len(joined), NAME_BYTES)]
