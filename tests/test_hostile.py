"""An everyday sample of what `python tests/hostile` throws in the millions: nothing crashes,
nothing grows, and who is healthy does not notice."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hostile.checkpoints import BAD, HARMLESS, MARKER, Bad, damaged, good_folders
from hostile.codec import siege_codec
from hostile.commands import _open
from hostile.coordinators import siege_by_target, siege_coordinator
from hostile.loaded import Loader, loading
from hostile.messages import KINDS
from hostile.wire import siege_handshakes, siege_wire
from hostile.workers import siege_worker

SAMPLE = 1000
FOLDERS = [(kind, bad) for kind, bads in BAD.items() for bad in bads]
EVERYDAY = [bads[len(bads) // 2].name for bads in BAD.values()]
"""One bad folder of each kind is tried every day, the others are slow."""


def nothing(_: int) -> None:
    """Nobody watches."""


def test_the_codec_refuses_or_decodes_whatever_comes() -> None:
    found, kinds = siege_codec(2 * SAMPLE, 7, nothing)
    assert found.passed, found
    assert all(kind.messages for kind in kinds.values())
    assert kinds.keys() == KINDS.keys()


def test_no_hostile_peer_changes_a_token_of_a_healthy_request() -> None:
    found = siege_coordinator(SAMPLE, 7, nothing)
    assert found.passed, found
    assert found.hung_up > 0


def test_every_request_to_a_lying_target_ends_once_and_an_honest_one_serves_afterwards() -> None:
    found = siege_by_target(20, 7, nothing)
    assert found.passed, found


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return good_folders(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("victim", ["target", "small", "ngram", "head"])
def test_no_hostile_command_changes_what_a_worker_answers(
    victim: str, good: Mapping[str, Path]
) -> None:
    found = siege_worker(victim, _open(victim, good), SAMPLE, 7, nothing)
    assert found.passed, found
    assert found.hung_up > 0


def test_what_only_sockets_let_through_holds_nobody_up() -> None:
    found = siege_wire(500, 7, nothing)
    assert found.passed, found


def test_who_may_not_connect_does_not_and_disturbs_nobody(tmp_path: Path) -> None:
    found = siege_handshakes(20, tmp_path, nothing)
    assert found.passed, found
    assert found.refused > 0


# -- folders ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loader() -> Iterator[Loader]:
    with loading() as opened:
        yield opened


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        pytest.param(
            kind, bad, id=bad.name, marks=[] if bad.name in EVERYDAY else [pytest.mark.slow]
        )
        for kind, bad in FOLDERS
    ],
)
def test_a_bad_folder_is_refused_in_one_line_and_nothing_is_executed(
    loader: Loader, kind: str, bad: Bad
) -> None:
    tried = loader.refused(kind, bad)
    assert tried.passed, tried


@pytest.mark.slow
@pytest.mark.parametrize("bad", HARMLESS, ids=lambda bad: bad.name)
def test_what_is_of_no_effect_is_served_and_not_executed(loader: Loader, bad: Bad) -> None:
    tried = loader.ignored("of no effect", bad)
    assert tried.passed, tried


def test_a_payload_does_harm_where_it_is_unpickled(
    good: Mapping[str, Path], tmp_path: Path
) -> None:
    """Otherwise nothing would show that it was not."""
    bad = next(bad for _, bad in FOLDERS if bad.name == "a pickle with a payload for weights")
    file = damaged(bad, good, tmp_path) / "pytorch_model.bin"
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))",
            str(file),
        ],
        check=True,
    )
    assert (tmp_path / MARKER).exists()


@pytest.mark.slow
def test_the_command_prints_what_became_of_it() -> None:
    command = [
        sys.executable,
        str(Path(__file__).parent / "hostile"),
        "--messages",
        "1000",
        "--only",
        "codec",
        "--only",
        "templates",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert [
        (victim["victim"], victim["messages"], victim["passed"]) for victim in result["victims"]
    ] == [("codec", 1000, True)]
    assert result["inputs"]
    assert all(tried["passed"] for tried in result["inputs"])
