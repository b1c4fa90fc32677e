"""`dovetail serve` with a model for agents."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clients.server import serving

from agents.model import write_gguf, write_model


@contextmanager
def serving_agents(given: Path | None = None) -> Iterator[str]:
    """The URL of a server with a GGUF file, by default with the model for agents."""
    with tempfile.TemporaryDirectory(prefix="dovetail-agents-") as folder:
        at = Path(folder)
        model = write_model(at / "model") if given is None else write_gguf(given, at / "model.gguf")
        with serving(f"--target.model={model}", "--draft.kind=ngram") as url:
            yield url
