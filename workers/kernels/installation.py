"""Makes pip compile the C++ kernels in parallel, and each object only once: objects are kept in
`build/kernels` under a digest of everything that they depend on, so that a wheel after an editable
installation only links. Used by pyproject.toml, never at run time."""

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
    """Builds the extension from cached objects."""

    def build_extension(self, ext: Extension) -> None:
        """Compile missing objects, and link."""
        kept = Path(self.get_finalized_command("build").build_base) / "kernels"
        kept.mkdir(parents=True, exist_ok=True)
        tools = {name: vars(self.compiler)[name] for name in self.compiler.executables}
        common = repr((tools, self.compiler.include_dirs)).encode()
        common += b"".join(Path(header).read_bytes() for header in ext.depends)
        compile_one = partial(_kept_object, kept, self.compiler.compile, common)
        self.compiler.compile = partial(_compile_side_by_side, compile_one)
        super().build_extension(ext)


def _compile_side_by_side(compile_one: Any, sources: list[str], **options: Any) -> list[str]:
    """Return the objects of all sources; those with the most code are started first."""
    ordered = sorted(sources, key=lambda source: not Path(source).stem.startswith("isa_"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(partial(compile_one, options), ordered))


def _kept_object(
    kept: Path, compiler: Any, common: bytes, options: dict[str, Any], source: str
) -> str:
    """Return the object of one source, compiled unless it exists."""
    given = {name: value for name, value in options.items() if name != "output_dir"}
    content = common + repr(sorted(given.items())).encode() + Path(source).read_bytes()
    made = kept / f"{Path(source).stem}-{hashlib.sha256(content).hexdigest()[:16]}.o"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=kept) as folder:
            (written,) = compiler([source], **options | {"output_dir": folder})
            Path(written).replace(made)
    return str(made)
