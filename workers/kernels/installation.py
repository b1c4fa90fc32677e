"""Has pip compile the files of the C++ kernels side by side, and none twice: an object is kept in
`build/kernels` under a digest of all that it is made of, so that a wheel after an editable
installation only links. pyproject.toml names it; nothing at run time imports it."""

import hashlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext


class BuildKernels(build_ext):  # type: ignore[misc]
    """Builds the extension from objects that are kept."""

    def build_extension(self, ext: Extension) -> None:
        """Compile what is not kept, and link."""
        kept = Path(self.get_finalized_command("build").build_base) / "kernels"
        kept.mkdir(parents=True, exist_ok=True)
        tools = {name: vars(self.compiler)[name] for name in self.compiler.executables}
        common = repr((tools, self.compiler.include_dirs)).encode()
        common += b"".join(Path(header).read_bytes() for header in ext.depends)
        compile_one = partial(_kept_object, kept, self.compiler.compile, common)
        self.compiler.compile = partial(_compile_side_by_side, compile_one)
        super().build_extension(ext)


def _compile_side_by_side(compile_one: Any, sources: list[str], **options: Any) -> list[str]:
    """The objects of all sources; those with the most code are begun first."""
    ordered = sorted(sources, key=lambda source: not Path(source).stem.startswith("isa_"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(partial(compile_one, options), ordered))


def _kept_object(
    kept: Path, compiler: Any, common: bytes, options: dict[str, Any], source: str
) -> str:
    """The object of one source, compiled unless it is there."""
    given = {name: value for name, value in options.items() if name != "output_dir"}
    content = common + repr(sorted(given.items())).encode() + Path(source).read_bytes()
    made = kept / f"{Path(source).stem}-{hashlib.sha256(content).hexdigest()[:16]}.o"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=kept) as folder:
            (written,) = compiler([source], **options | {"output_dir": folder})
            Path(written).replace(made)
    return str(made)
