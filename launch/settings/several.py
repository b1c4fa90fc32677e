"""Several models named on a command line: those of a folder of models, and the names under which
they are served."""

from collections.abc import Callable, Sequence
from pathlib import Path

from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import UserError
from dovetail.workers.models.checkpoints.gguf.names import is_gguf, models_in


class Several:
    """The models of a command, with their settings."""

    def __init__(self, named: Sequence[str], read: Callable[..., Configuration]) -> None:
        """`read` returns the settings for a model."""
        self._read = read
        inside = {one: models_inside(Path(one).expanduser()) for one in named}
        self._inside = {str(path) for paths in inside.values() for path in paths}
        each = [[str(path) for path in inside[one]] or [one] for one in named]
        self.sources = [*dict.fromkeys(source for sources in each for source in sources)]

    def configurations(
        self, check: Callable[[Configuration], None], say: Callable[[str], None]
    ) -> dict[str, Configuration]:
        """Return the settings of each model, by its name; `UserError` for one that was named and
        that `check` refuses. `say` gets a line for each one in a folder that is skipped."""
        found = {}
        for name, source in zip(names_of(self.sources), self.sources, strict=True):
            try:
                configuration = self._read(model=source)
                check(configuration)
                found[name] = configuration
            except UserError as error:
                if source not in self._inside:
                    raise
                say(f"{source} is skipped: {error}")
        if not found:
            raise UserError("none of these models can be served")
        return found


def models_inside(folder: Path) -> list[Path]:
    """Return the models in a folder that is not itself a model: its folders with a config.json, and
    its GGUF files if they are several."""
    if not folder.is_dir() or (folder / "config.json").is_file():
        return []
    there = sorted(folder.iterdir())
    files = [folder / name for name in models_in(path.name for path in there if is_gguf(path))]
    folders = [
        path
        for path in there
        if path.is_dir() and ((path / "config.json").is_file() or _files_in(path))
    ]
    return [*folders, *files] if folders or len(files) > 1 else []


def _files_in(folder: Path) -> list[str]:
    return models_in(path.name for path in folder.glob("*.gguf"))


def names_of(sources: Sequence[str]) -> list[str]:
    """Return a name for each model: a hub id, or the last part of a path, with parts before it if
    two would be equal."""
    parts = [
        list(path.parts)
        if (path := Path(source).expanduser()).exists() or path.is_absolute()
        else [source]
        for source in sources
    ]
    length = [1] * len(parts)
    while True:
        names = ["/".join(own[-count:]) for own, count in zip(parts, length, strict=True)]
        twice = [
            index
            for index, name in enumerate(names)
            if names.count(name) > 1 and length[index] < len(parts[index])
        ]
        if not twice:
            return [name[: -len(".gguf")] if is_gguf(name) else name for name in names]
        for index in twice:
            length[index] += 1
