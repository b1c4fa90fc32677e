"""`dovetail pull`, `list` and `rm`, against a small server that speaks the hub's endpoints."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dovetail.launch.settings.models import DEMO_FOLDER, TARGET_FOLDER
from support.hub import Hub, folder_content, hub

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def served() -> Iterator[Hub]:
    target = folder_content(TARGET_FOLDER)
    repositories = {
        "owner/demo": {
            **target,
            "consolidated.safetensors": b"twice",
            "original/model.safetensors": b"thrice",
            "README.md": b"# demo",
            "pytorch_model.bin": b"pickled",
        },
        "owner/quants": {
            "m-Q4_K_M.gguf": b"4" * 3000,
            "m-Q8_0.gguf": b"8" * 5000,
            "mmproj-m.gguf": b"image encoder",
            "big/n-f16-00001-of-00002.gguf": b"a" * 100,
            "big/n-f16-00002-of-00002.gguf": b"b" * 50,
        },
        "owner/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickled"},
    }
    with hub(repositories) as own:
        yield own


@pytest.fixture
def dovetail(run: Run, environment: dict[str, str], served: Hub, tmp_path: Path) -> Run:
    """A command of a user of this hub with an empty cache."""
    own = {"HF_ENDPOINT": served.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    inherited = {k: v for k, v in environment.items() if not k.startswith("HF_")}

    def dovetail(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return run(*arguments, env={**inherited, **own, **more})

    return dovetail


def test_a_model_is_pulled_listed_used_and_removed(dovetail: Run, served: Hub) -> None:
    done = dovetail("pull", "owner/demo")
    assert (done.returncode, done.stdout) == (0, "owner/demo\n"), done.stderr
    kinds = (".json", ".jinja", ".safetensors")
    needed = {name for name in folder_content(TARGET_FOLDER) if name.endswith(kinds)}
    assert {*served.served} == needed
    size = sum(len(served.repositories["owner/demo"][name]) for name in needed) / 1e9
    assert (
        f"owner/demo: {size:.3g} GB, {size:.3g} GB to download; license: apache-2.0" in done.stderr
    )

    again = dovetail("pull", "owner/demo@main")
    assert "0 GB to download" in again.stderr
    assert len(served.served) == len(needed)

    used = dovetail(
        *("generate", "--target", "owner/demo", "--draft", "none", "--max-tokens", "2", "Hello."),
        HF_HUB_OFFLINE="1",
    )
    assert (used.returncode, bool(used.stdout.strip())) == (0, True), used.stderr

    listed = dovetail("list", "--json", HF_HUB_OFFLINE="1")
    (model,) = json.loads(listed.stdout)["models"]
    assert (model["model"], model["drafts"]) == ("owner/demo", None)
    assert "owner/demo" in dovetail("list").stdout

    removed = dovetail("rm", "owner/demo")
    assert removed.stdout.startswith("owner/demo is removed; "), removed.stderr
    assert dovetail("list").stdout == "no models: `dovetail pull owner/name` downloads one\n"


def test_one_gguf_file_of_a_repository_is_pulled_and_removed(dovetail: Run, served: Hub) -> None:
    several = dovetail("pull", "owner/quants")
    assert (several.returncode, served.served) == (2, [])
    assert several.stderr.endswith(
        "owner/quants has several models: name one, as in `dovetail pull "
        "owner/quants/big/n-f16-00001-of-00002.gguf`; it has big/n-f16-00001-of-00002.gguf "
        "(1e-07 GB), m-Q4_K_M.gguf (3e-06 GB), m-Q8_0.gguf (5e-06 GB)\n"
    )
    absent = dovetail("pull", "owner/quants:Q5_1")
    assert "owner/quants has no GGUF file Q5_1; it has big/n-f16" in absent.stderr
    assert dovetail("pull", "owner/quants:q4_k_m").stdout == "owner/quants/m-Q4_K_M.gguf\n"
    assert served.served == ["m-Q4_K_M.gguf"]
    assert dovetail("pull", "owner/quants:f16").returncode == 0
    assert {*served.served[1:]} == {f"big/n-f16-0000{part}-of-00002.gguf" for part in (1, 2)}

    listed = json.loads(dovetail("list", "--json").stdout)["models"]
    assert [(one["model"], one["size"]) for one in listed] == [
        ("owner/quants/big/n-f16-00001-of-00002.gguf", 150),
        ("owner/quants/m-Q4_K_M.gguf", 3000),
    ]
    assert dovetail("rm", "owner/quants/m-Q4_K_M.gguf").returncode == 0
    (left,) = json.loads(dovetail("list", "--json").stdout)["models"]
    assert left["size"] == 150


def test_a_model_whose_download_was_interrupted_is_listed_as_incomplete(
    dovetail: Run, served: Hub, tmp_path: Path
) -> None:
    for name in ("owner/demo", "owner/quants:f16"):
        assert dovetail("pull", name).returncode == 0
    assert "incomplete" not in dovetail("list").stdout
    for name in ("model.safetensors", "n-f16-00002-of-00002.gguf"):
        (file,) = (tmp_path / "hf" / "hub").glob(f"models--*/snapshots/**/{name}")
        file.unlink()
    assert dovetail("list").stdout.count("GB, incomplete") == 2
    listed = json.loads(dovetail("list", "--json").stdout)["models"]
    assert [one["complete"] for one in listed] == [False, False]
    assert dovetail("pull", "owner/demo").returncode == 0
    assert dovetail("list").stdout.count("GB, incomplete") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pull", "owner/absent"), "owner/absent is not a folder here and not in the Hugging Face"),
        (("pull", "ü/ü"), "the hub does not provide it (Repo id must use alphanumeric"),
        (("pull", "owner/pickled"), "has neither *.safetensors nor GGUF files on the hub"),
        (("rm", "owner/demo"), "owner/demo is not in the Hugging Face cache: `dovetail list`"),
        (("list", "/absent"), "/absent does not exist"),
    ],
)
def test_a_mistake_is_one_line(dovetail: Run, arguments: tuple[str, ...], words: str) -> None:
    done = dovetail(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert words in done.stderr


def test_nothing_is_downloaded_without_room_a_token_or_the_network(
    dovetail: Run, served: Hub
) -> None:
    served.claimed["m-Q8_0.gguf"] = 1 << 60
    full = dovetail("pull", "owner/quants:Q8_0")
    assert full.returncode == 2
    assert "owner/quants/m-Q8_0.gguf needs 1.15e+09 GB in " in full.stderr
    offline = dovetail("pull", "owner/demo", HF_HUB_OFFLINE="1")
    assert (offline.returncode, "HF_HUB_OFFLINE is set" in offline.stderr) == (2, True)
    served.token = "hf_secret"
    refused = dovetail("pull", "owner/demo")
    assert (refused.returncode, "HF_TOKEN" in refused.stderr) == (2, True), refused.stderr
    assert served.served == []
    assert dovetail("pull", "owner/quants:Q4_K_M", HF_TOKEN="hf_secret").returncode == 0


@pytest.mark.slow
def test_the_drafts_that_fit_are_listed(dovetail: Run, tmp_path: Path) -> None:
    for name in ("target", "draft"):
        shutil.copytree(DEMO_FOLDER / name, tmp_path / "models" / name)
    listed = json.loads(dovetail("list", "--drafts", "--json", str(tmp_path / "models")).stdout)
    drafts = {Path(one["model"]).name: one["drafts"] for one in listed["models"]}
    assert drafts["target"] == [str(tmp_path / "models" / "draft")]
    assert drafts["draft"] == []
