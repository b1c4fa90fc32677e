"""The peer of `dovetail bench`: a process that decodes with transformers' assisted generation."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.launch.bench import methods
from dovetail.launch.bench.methods import read_method
from dovetail.launch.machine.cores import lay_out_here
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import Configuration, configure
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import Sampling
from peers.assisted import AssistedPeer, assistant_of, check, near_the_fastest, thread_counts_of
from support.heads import write_head

TURNS = ["Tell me a story about a small owl."]


def settings(**flags: str) -> Configuration:
    return configure(
        flags={
            name.replace("__", "."): text
            for name, text in {"draft__device": "cpu", **flags}.items()
        },
        environment={},
    )


@pytest.fixture(scope="module")
def peer() -> Iterator[AssistedPeer]:
    with Supervisor() as supervisor:
        peer = AssistedPeer(supervisor, settings(), lay_out_here())
        yield peer
        peer.close()


def test_it_is_tried_with_all_its_cores_and_with_one_and_what_is_hopeless_is_left_out() -> None:
    assert [thread_counts_of(cores) for cores in (1, 2, 64)] == [(1,), (2, 1), (64,)]
    assert near_the_fastest({2: 1.0, 1: 1.5}) == (2, 1)
    assert near_the_fastest({2: 9.0, 1: 1.5}) == (1,)


@pytest.mark.slow
def test_a_reply_is_the_same_with_the_same_seed_and_is_told_in_the_words_of_ours(
    peer: AssistedPeer,
) -> None:
    replies = [
        peer.decode(TURNS, sampling=Sampling(temperature=1.0), max_tokens=12, seed=5, threads=1)
        for _ in range(2)
    ]
    result = replies[0].result
    assert result.token_ids == replies[1].result.token_ids
    assert result.completion_tokens == len(result.token_ids) <= 12
    assert 0 < result.time_to_first_token_s <= result.wall_s
    assert peer.peak_rss_mb() > 100


@pytest.mark.slow
def test_a_process_that_cannot_load_its_models_says_why() -> None:
    with Supervisor() as supervisor, pytest.raises(UserError, match="the assisted: transformers: "):
        AssistedPeer(
            supervisor, settings(draft__model=str(DEMO_FOLDER / "nothing")), lay_out_here()
        )


def test_processors_that_look_back_and_other_devices_are_refused() -> None:
    with pytest.raises(UserError, match="leave penalties"):
        check(settings(sampling__presence_penalty="0.5").settings)
    with pytest.raises(UserError, match="runs on the CPU"):
        check(settings(target__device="cuda:0").settings)


def test_where_the_draft_is_no_whole_model_the_embedded_one_assists_the_embedded_target(
    tmp_path: Path,
) -> None:
    head, embedded = str(write_head(tmp_path, "eagle")), str(DEMO_FOLDER / "draft")
    assert (
        assistant_of(settings().settings)
        == assistant_of(settings(draft__model=head).settings)
        == embedded
    )
    whole = str(DEMO_FOLDER / "target")
    assert assistant_of(settings(draft__model=whole).settings) == whole
    with pytest.raises(UserError, match="needs a whole model for the assistant"):
        assistant_of(settings(draft__model=head, target__model=whole).settings)


def test_an_installation_has_no_peers_and_reports_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "CHECKOUT", tmp_path)
    methods.peers.cache_clear()
    with pytest.raises(UserError, match="--method assisted is part of a checkout"):
        read_method(settings(), "assisted")
    methods.peers.cache_clear()
