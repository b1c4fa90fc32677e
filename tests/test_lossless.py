"""The promise itself, over real processes and the embedded pair: the same tokens with and without
speculation, and as transformers generates.

Processes take seconds to start: every day each kind of draft, type of weights and back end runs in
one combination; the slow tests run the others.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from dovetail.launch.settings.models import DEMO_FOLDER, head_folder
from dovetail.protocol.messages import Finished
from dovetail.protocol.settings import HEAD_KINDS, Sampling, TreeSettings
from dovetail.runtime.client import Client
from dovetail.workers import kernels
from support.cases import everyday
from support.gguf_heads import write_gguf_head
from support.heads import Variant, write_head
from support.inflated import inflated
from support.losslessness import difference
from support.models import tiny_llama
from support.stacks import PROMPTS, complete_all, running, submit

TREES = {
    f"{t.gamma}/{t.depth}/{t.width}": t
    for t in (
        TreeSettings(policy="dynamic", insist=True, gamma=g, depth=d, width=w)
        for g, d, w in ((1, 1, 1), (2, 2, 1), (6, 5, 10), (15, 8, 10), (64, 12, 8))
    )
}
"""Trees of a policy that drafts whether that pays or not."""
REPEATING = [
    "Repeat after me: one two three four five, one two three four five, one two three four "
    "five, one two"
]
FILTERS = {
    "plain": {},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "all": {"top_k": 50, "top_p": 0.95, "min_p": 0.02},
}
TOKENS = 48

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")


PENALTIES = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    "bias": {"logit_bias": ((15, -100.0), (17, 3.0)), "min_tokens": 40},
    "all": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.6,
        "frequency_penalty": -0.3,
        "logit_bias": ((15, -8.0), (17, 2.5)),
        "min_tokens": 30,
        "top_p": 0.95,
        "min_p": 0.01,
    },
}


def complete(
    client: Client,
    turns: Sequence[str],
    *,
    seed: int = 0,
    tree: TreeSettings | None = None,
    tokens: int = TOKENS,
    **sampling: object,
) -> Finished:
    return client.complete(
        submit(
            client,
            turns,
            sampling=Sampling.model_validate(sampling),
            tokens=tokens,
            seed=seed,
            tree=tree,
        )
    )


def check_all(
    client: Client,
    prompts: Sequence[Sequence[str]],
    trees: dict[str, TreeSettings],
    **options: float,
) -> None:
    """Every tree gives what the target alone gives."""
    for turns in prompts:
        alone = complete(client, turns, **options)  # type: ignore[arg-type]
        assert alone.result.drafted_tokens == 0
        for name, tree in trees.items():
            wrong = difference(
                complete(client, turns, tree=tree, **options), alone.result.token_ids
            )  # type: ignore[arg-type]
            assert wrong is None, f"tree {name}, {options}, {turns}: {wrong}"


EVERYDAY_TREES = {name: TREES[name] for name in ("2/2/1", "64/12/8")}
MORE_PROMPTS = [
    pytest.param(number, marks=() if number == 0 else pytest.mark.slow) for number in range(2)
]


@pytest.mark.parametrize("prompt", MORE_PROMPTS)
def test_greedy_output_is_the_same_with_any_tree(client: Client, prompt: int) -> None:
    check_all(client, PROMPTS[prompt : prompt + 1], TREES)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
@pytest.mark.parametrize("filters", everyday(FILTERS, "all"))
def test_sampled_output_is_the_same_with_and_without_speculation(
    client: Client, filters: str, seed: int
) -> None:
    check_all(
        client,
        PROMPTS[seed : seed + 2],
        {"15/8/10": TREES["15/8/10"]},
        temperature=1.0,
        seed=seed,
        **FILTERS[filters],
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", MORE_PROMPTS)
def test_sampled_output_is_the_same_with_any_tree(client: Client, prompt: int) -> None:
    check_all(client, PROMPTS[prompt : prompt + 1], TREES, temperature=1.0, seed=11)


@pytest.mark.parametrize("temperature", everyday([0.0, 1.0], 1.0))
@pytest.mark.parametrize("penalties", everyday(PENALTIES, "all"))
def test_output_is_the_same_with_processors_that_look_back(
    client: Client, penalties: str, temperature: float
) -> None:
    check_all(
        client,
        PROMPTS[3:4],
        EVERYDAY_TREES,
        temperature=temperature,
        seed=6,
        **PENALTIES[penalties],
    )  # type: ignore[arg-type]


def test_processors_that_look_back_do_what_they_say(client: Client) -> None:
    tree = TREES["15/8/10"]
    plain = complete(client, PROMPTS[0], tree=tree).result
    banned = plain.token_ids[3]
    assert (
        banned
        not in complete(
            client, PROMPTS[0], tree=tree, logit_bias=((banned, -100.0),)
        ).result.token_ids
    )
    varied = complete(
        client, PROMPTS[0], tree=tree, frequency_penalty=2.0, presence_penalty=2.0
    ).result
    assert len(set(varied.token_ids)) / len(varied.token_ids) > len(set(plain.token_ids)) / len(
        plain.token_ids
    )
    turns = ["Say hello."]
    short = complete(client, turns, tree=tree).result
    assert short.finish_reason == "stop"
    longer = complete(client, turns, tree=tree, min_tokens=short.completion_tokens + 4).result
    assert longer.completion_tokens >= short.completion_tokens + 4


def test_speculation_happens_and_saves_target_passes(client: Client) -> None:
    rounds = tokens = 0
    for turns in PROMPTS[:8]:
        result = complete(client, turns, tree=TREES["15/8/10"]).result
        rounds, tokens = rounds + result.rounds, tokens + result.completion_tokens - 1
    assert tokens / rounds > 1.5


def test_interleaved_requests_give_what_each_gives_alone(client: Client) -> None:
    alone = [
        complete(client, turns, temperature=1.0, seed=5).result.token_ids for turns in PROMPTS[:6]
    ]
    check_interleaved(client, alone, tokens=TOKENS)


def check_interleaved(client: Client, alone: Sequence[tuple[int, ...]], *, tokens: int) -> None:
    """The first prompts at temperature 1, all at once, give these tokens."""
    together = [
        submit(
            client,
            turns,
            sampling=Sampling(temperature=1.0),
            tokens=tokens,
            seed=5,
            tree=TREES["6/5/10"],
        )
        for turns in PROMPTS[: len(alone)]
    ]
    for finished, reference in zip(complete_all(client, together), alone, strict=True):
        wrong = difference(finished, reference)
        assert wrong is None, wrong


def test_different_seeds_give_different_samples_and_the_same_seed_the_same(client: Client) -> None:
    outputs = [
        complete(client, PROMPTS[0], temperature=1.0, seed=seed).result.token_ids
        for seed in (1, 2, 1)
    ]
    assert outputs[0] == outputs[2] != outputs[1]


@pytest.mark.parametrize("number", everyday(range(3), 0))
def test_greedy_output_is_what_transformers_generates(client: Client, number: int) -> None:
    reference, prompt = generated(DEMO_FOLDER / "target", turns := PROMPTS[number])
    finished = complete(client, turns, tree=TREES["15/8/10"])
    assert finished.result.prompt_tokens == len(prompt)
    wrong = difference(finished, reference)
    assert wrong is None, wrong


def generated(folder: Path, turns: list[str]) -> tuple[list[int], list[int]]:
    """Greedy tokens and prompt of transformers' own `generate`, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    messages = [{"role": "user", "content": turns[0]}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False)
    ids = prompt["input_ids"][0].tolist()
    return output[0].tolist()[len(ids) :], ids


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_inflated_target_with_another_draft_writes_the_same(
    client: Client, temperature: float
) -> None:
    """Another draft and other costs: the target's first layers and dead weight around them change
    no token but at a near-tie."""
    plain = [complete(client, turns, temperature=temperature, seed=8) for turns in PROMPTS[:2]]
    with running(inflated("96MiB", str(DEMO_FOLDER / "target"))) as larger:
        for turns, alone in zip(PROMPTS, plain, strict=False):
            finished = complete(
                larger, turns, tree=TREES["15/8/10"], temperature=temperature, seed=8
            )
            assert finished.result.fingerprint != alone.result.fingerprint
            assert finished.result.accepted_tokens > finished.result.rounds, (
                "a target that drafts for itself is nearly always right"
            )
            wrong = difference(finished, alone.result.token_ids)
            assert wrong is None, wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "backend", "cache"),
    [
        ("half", "kernels", "fp32"),
        ("half", "kernels", "half"),
        ("half", "kernels", "q8"),
        ("int8", "kernels", "auto"),
        ("half", "library", "auto"),
        ("fp32", "library", "auto"),
    ],
)
def test_every_type_of_weights_is_lossless_on_every_back_end(
    client: Client, weights: str, backend: str, cache: str
) -> None:
    """`client` computes fp32 as `auto` does; the checkpoint is in fp16, so that half weights are
    the same function, but for keys and values in 16 bits."""
    if backend == "kernels" and not kernels.available():
        pytest.skip("the C++ kernels are not built")
    trees = {name: TREES[name] for name in ("6/5/10", "64/12/8")}
    with running(
        {
            "target.weights": weights,
            "target.backend": backend,
            "target.cache": cache,
            "draft.device": "cpu",
        }
    ) as other:
        for temperature in (0.0, 1.0):
            check_all(other, PROMPTS[:3], trees, temperature=temperature, seed=4)
        if weights != "int8" and cache not in ("half", "q8"):
            wrong = difference(
                complete(other, PROMPTS[0]), complete(client, PROMPTS[0]).result.token_ids
            )
            assert wrong is None, wrong


def test_a_draft_that_looks_up_serves_without_torch() -> None:
    with running({"draft.kind": "ngram"}) as client:
        assert complete(client, PROMPTS[0]).result.token_ids
        (draft,) = [w.pid for w in client.status().workers if w.roles == ("draft",)]
        assert "libtorch" not in Path(f"/proc/{draft}/maps").read_text()


@pytest.mark.slow
def test_a_draft_that_looks_up_what_was_said_changes_nothing(client: Client) -> None:
    with running({"draft.kind": "ngram"}) as looking_up:
        drafts = [w for w in looking_up.status().workers if w.roles == ("draft",)]
        assert [(w.model, w.device) for w in drafts] == [("ngram", "cpu")]
        for options in (
            {},
            {"temperature": 1.0},
            {"temperature": 1.0, **PENALTIES["all"]},
            PENALTIES["repetition"],
        ):
            for turns in [*PROMPTS[:3], REPEATING]:
                alone = complete(client, turns, seed=4, **options)  # type: ignore[arg-type]
                for tree in (TREES["6/5/10"], TREES["64/12/8"]):
                    wrong = difference(
                        complete(looking_up, turns, seed=4, tree=tree, **options),
                        alone.result.token_ids,
                    )  # type: ignore[arg-type]
                    assert wrong is None, f"{options}, {turns}: {wrong}"


HEADS = {
    "eagle": {"fc_bias": True},
    "eagle3": {"draft_vocabulary": 1000, "taps": (2, 4, 5)},
    "dovetail": {"blocks": 2},
    "jakiro": {},
    "jakiro*": {"contrast": False, "experts": 3},
}


EMBEDDED = {
    "hidden": 256,
    "target_width": 256,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 32,
    "intermediate": 256,
    "dtype": torch.float16,
    "vocabulary": 4096,
    "draft_vocabulary": 4096,
    "config": {"max_position_embeddings": 512},
}
"""The shape of a head for the embedded target."""


def demo_head(folder: Path, kind: str) -> Path:
    """A head with random weights for the embedded target."""
    return write_head(folder, Variant(kind, **{**EMBEDDED, **HEADS[kind]}))  # type: ignore[arg-type]


def check_head(
    client: Client,
    flags: dict[str, str],
    prompts: Sequence[Sequence[str]],
    *,
    trees: Sequence[str] = ("6/5/10",),
    tokens: int = 32,
) -> Finished:
    """Check that with this draft every prompt gives what the target alone gives; return the last
    reply."""
    with running({"draft.device": "cpu", **flags}) as drafted:
        for options in ({}, {"temperature": 1.0}, {"temperature": 1.0, **PENALTIES["all"]}):
            for turns in prompts:
                alone = complete(client, turns, seed=4, tokens=tokens, **options)  # type: ignore[arg-type]
                for name in trees:
                    finished = complete(
                        drafted, turns, seed=4, tree=TREES[name], tokens=tokens, **options
                    )  # type: ignore[arg-type]
                    assert finished.result.drafted_tokens > 0
                    wrong = difference(finished, alone.result.token_ids)
                    assert wrong is None, f"{flags}, tree {name}, {options}, {turns}: {wrong}"
        assert (drafted.status().stale, drafted.status().reasons) == (0, ())
    return finished


EVERYDAY_SAMPLINGS: tuple[dict[str, object], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, **PENALTIES["all"]},
    PENALTIES["repetition"],
)


def check_combination(
    client: Client,
    flags: dict[str, str],
    *,
    tree: str,
    tokens: int = TOKENS,
    same_function: bool = True,
    prompts: Sequence[Sequence[str]] = (PROMPTS[0], REPEATING),
) -> list[Finished]:
    """Check that the draft of these processes changes nothing, one request at a time and several at
    once; return the drafted replies to single requests.

    `same_function`: this target computes what that of `client` does; else it is compared with
    itself without a draft.
    """
    replies = []
    with running(flags) as drafted:
        reference = client if same_function else drafted
        for options in EVERYDAY_SAMPLINGS:
            for turns in prompts:
                alone = complete(
                    reference, turns, seed=4, tokens=tokens, **options
                ).result.token_ids  # type: ignore[arg-type]
                replies.append(
                    complete(drafted, turns, seed=4, tokens=tokens, tree=TREES[tree], **options)
                )  # type: ignore[arg-type]
                wrong = difference(replies[-1], alone)
                assert wrong is None, f"{options}, {turns}: {wrong}"
        together = [
            complete(reference, turns, temperature=1.0, seed=5, tokens=24).result.token_ids
            for turns in PROMPTS[:4]
        ]
        check_interleaved(drafted, together, tokens=24)
        assert (drafted.status().stale, drafted.status().reasons) == (0, ())
    assert sum(reply.result.drafted_tokens for reply in replies) > 0
    return replies


@needs_kernels
@pytest.mark.parametrize("prompts", everyday([1, 2], 1))
def test_the_embedded_head_and_half_weights_that_are_split_and_streamed_change_nothing(
    client: Client, prompts: int
) -> None:
    """The checkpoint is in fp16, so that half weights are the same function, with keys and values
    in fp32. The CPU stands for the device that has some layers, streams others, and reads
    prompts."""
    flags = {
        "draft.kind": "dovetail",
        "draft.device": "cpu",
        "target.weights": "half",
        "target.cache": "fp32",
        "target.split.device": "cpu",
        "target.split.layers": "4",
        "target.resident": "1",
        "target.prefill": "cpu",
    }
    replies = check_combination(
        client, flags, tree="15/8/10", tokens=32, prompts=(PROMPTS[0], REPEATING)[:prompts]
    )
    assert sum(reply.result.accepted_tokens for reply in replies) > 0.5 * sum(
        reply.result.rounds for reply in replies
    )
    assert {reply.result.placement for reply in replies} == {
        "cpu 0-3, cpu 4-7 (1 resident, 3 streamed) and head; prompts read by cpu"
    }
    assert "cpu" in {reply.result.prefill for reply in replies}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in HEAD_KINDS if head_folder(kind).is_dir()])
def test_an_embedded_head_changes_nothing_and_saves_target_passes(
    client: Client, kind: str
) -> None:
    result = check_head(
        client, {"draft.kind": kind}, PROMPTS[:3], trees=("15/8/10",), tokens=TOKENS
    ).result
    assert result.accepted_tokens > 0.5 * result.rounds


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "int8", "int4"])
def test_a_head_changes_nothing_whatever_its_type_of_weights(
    client: Client, weights: str, tmp_path: Path
) -> None:
    check_head(
        client,
        {"draft.model": str(demo_head(tmp_path, "dovetail")), "draft.weights": weights},
        PROMPTS[:1],
    )


@pytest.mark.slow
def test_a_head_in_a_gguf_file_that_reads_the_last_stream_changes_nothing(
    client: Client, tmp_path: Path
) -> None:
    config = {"max_position_embeddings": 512, "norm_before_residual": True}
    shape = {**EMBEDDED, "draft_vocabulary": 1000, "taps": (2, 4, 8), "config": config}
    folder = write_head(tmp_path / "head", Variant("eagle3", **shape))  # type: ignore[arg-type]
    write_gguf_head(folder, tmp_path / "head.gguf", GGMLQuantizationType.Q8_0)
    check_head(client, {"draft.model": str(tmp_path / "head.gguf")}, PROMPTS[:1])


@pytest.mark.slow
def test_a_head_of_another_target_takes_the_embedding_of_that_target(tmp_path: Path) -> None:
    target, head = (
        tiny_llama(tmp_path / "target", layers=7),
        write_head(tmp_path / "head", "eagle3", taps=(2, 3, 4)),
    )
    with running(
        {"target.model": str(target), "draft.model": str(head), "draft.device": "cpu"}
    ) as tiny:
        sampling, prompt = Sampling(temperature=1.0), (2, 3, 5, 7, 11)
        alone, drafted = (
            tiny.complete(
                tiny.submit(
                    tokens=prompt,
                    sampling=sampling,
                    max_tokens=40,
                    seed=1,
                    tree=TREES["15/8/10"],
                    speculate=speculate,
                )
            )
            for speculate in (False, True)
        )
        assert drafted.result.drafted_tokens > 0
        wrong = difference(drafted, alone.result.token_ids)
        assert wrong is None, wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_all_shipped_prompts_with_a_head_of_every_kind(
    client: Client, kind: str, tmp_path: Path
) -> None:
    check_head(
        client,
        {"draft.model": str(demo_head(tmp_path, kind))},
        PROMPTS,
        trees=("2/2/1", "15/8/10", "64/12/8"),
        tokens=96,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_on_the_gpu_changes_nothing(client: Client, kind: str, tmp_path: Path) -> None:
    check_head(
        client,
        {"draft.model": str(demo_head(tmp_path, kind)), "draft.device": "cuda:0"},
        PROMPTS[:2],
    )


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_on_the_gpu_changes_nothing(client: Client, temperature: float) -> None:
    with running({"draft.device": "cuda:0"}) as on_gpu:
        assert any(w.device == "cuda:0" for w in on_gpu.status().workers)
        for turns in PROMPTS[:4]:
            alone = complete(client, turns, temperature=temperature, seed=8)
            wrong = difference(
                complete(on_gpu, turns, tree=TREES["15/8/10"], temperature=temperature, seed=8),
                alone.result.token_ids,
            )
            assert wrong is None, wrong


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_all_shipped_prompts_with_all_trees(client: Client, temperature: float) -> None:
    check_all(client, PROMPTS, TREES, temperature=temperature, seed=42, tokens=128)
