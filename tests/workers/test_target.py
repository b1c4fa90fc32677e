"""What a target worker is made of: settings in, a fingerprint out."""

from pathlib import Path

import pytest

from dovetail.protocol.errors import CheckpointError, SettingsError
from dovetail.protocol.settings import TargetSettings
from dovetail.workers.target import open_target_worker


def fingerprint(**settings: str) -> object:
    return open_target_worker(TargetSettings(**settings), name="t", threads=1).hello(1).fingerprint


def test_the_same_settings_give_the_same_fingerprint_and_an_inflation_another(llama_folder: Path) -> None:
    plain = fingerprint(model=str(llama_folder))
    assert fingerprint(model=str(llama_folder)) == plain
    inflated = fingerprint(model=str(llama_folder), inflate="1MB")
    assert inflated != plain
    assert fingerprint(model=str(llama_folder), inflate="1MB") == inflated


def test_the_limits_are_those_of_the_model(llama_folder: Path) -> None:
    limits = open_target_worker(TargetSettings(model=str(llama_folder)), name="t", threads=1).hello(1).limits
    assert limits is not None
    assert limits.context == 96


def test_a_size_that_is_none_is_refused_by_the_name_of_its_setting(llama_folder: Path) -> None:
    with pytest.raises(SettingsError, match=r"target\.inflate: 'huge'"):
        fingerprint(model=str(llama_folder), inflate="huge")


def test_a_target_without_a_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no model is named"):
        fingerprint()
