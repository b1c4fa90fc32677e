"""With `draft.device = auto` a GPU has to draft once before anything is served. A pretended one
does; where its memory ends too soon the CPU drafts, and that is said."""

from pathlib import Path

import pytest
import torch

from dovetail.protocol.profile import load_profile
from dovetail.protocol.settings import DraftSettings
from dovetail.workers.drafters.registry import open_draft_worker
from pretended.device import MEMORY, POSSIBLE, capped, device
from support.cases import everyday
from support.heads import write_head
from support.kernels import needs_kernels
from support.models import tiny_llama

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not POSSIBLE, reason="torch cannot be told of a device from Python"),
]


@pytest.mark.parametrize("kind", everyday(["small", "eagle3"], "eagle3"))
def test_a_gpu_drafts_once_before_it_is_chosen(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("dovetail.workers.drafters.trial.first_device", lambda: str(device()))
    target = tiny_llama(tmp_path / "target", intermediate_size=128, dtype=torch.float16)
    draft = target if kind == "small" else write_head(tmp_path / "head", kind)
    settings = DraftSettings(model=str(draft))

    profile = tmp_path / "profile.json"

    def opened() -> str:
        """Return where the draft runs."""
        worker = open_draft_worker(
            settings, name="draft", threads=1, target=str(target), profile=profile
        )
        return worker.hello(1).device

    before = MEMORY.most = MEMORY.used
    assert opened() == "pretended:0"
    needed = MEMORY.most - before
    for part in (0.02, 0.8):  # of which the first does not hold the weights
        capsys.readouterr()
        with capped(MEMORY.used + int(part * needed)):
            assert opened() == "cpu"
        said = capsys.readouterr().err
        assert "draft: drafts on the CPU, because on pretended:0: " in said
        (fall,) = load_profile(profile).falls
        assert fall.key[2:] == (str(draft), str(target), "auto")
        assert f"because on pretended:0: {fall.why}" in said
    assert opened() == "pretended:0"
    assert not load_profile(profile).falls
    assert not caplog.text  # graphs were not given up before
