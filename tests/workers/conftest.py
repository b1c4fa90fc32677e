"""Tiny models, written once a run; the state of the kernels."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dovetail.workers import kernels
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
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


@pytest.fixture(scope="session")
def halved_llama(llama_folder: Path) -> LanguageModel:
    """The random Llama with keys and values in 16 bits."""
    return load_language_model(
        str(llama_folder), weights="fp32", device="cpu", backend="kernels", cache="half"
    )


@pytest.fixture
def kernels_as_before() -> Iterator[None]:
    """Whatever a test chooses of the kernels, instructions or threads, is undone after it."""
    if not kernels.available():
        yield
        return
    isa, threads = kernels.isa(), kernels.threads()
    yield
    kernels.use_isa(isa)
    kernels.set_threads(threads)
