"""Tiny models, written once a run."""

from pathlib import Path

import pytest
import torch

from dovetail.workers.models.language_model import LanguageModel, load_language_model
from support.models import tiny_llama


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers."""
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def llama(llama_folder: Path) -> LanguageModel:
    return load_language_model(str(llama_folder), weights="fp32", device="cpu")
