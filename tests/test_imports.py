"""The arrows between the folders, core and extras, the doors to outside libraries, the list of
packages, how many entries a folder may have, and how many lines the folders may have together."""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("protocol", "runtime", "workers", "launch")
MAY_IMPORT = {
    "protocol": {"protocol"},
    "runtime": {"protocol", "runtime"},
    "workers": {"protocol", "workers"},
    "launch": set(FOLDERS),
}
DOORS = {
    "zmq": ("protocol/links/", "protocol/keys.py"),
    "llguidance": ("protocol/grammar.py",),
    "msgpack": ("protocol/codec.py", "runtime/record/recording.py", "runtime/journal/entries.py"),
    "tokenizers": (
        "runtime/text/tokenizer.py",
        "workers/drafters/translation.py",
        "workers/training/",
    ),
    "jinja2": ("runtime/text/rendering.py", "launch/files/deployment/containers.py"),
    "safetensors": ("workers/models/checkpoints/checkpoint.py", "workers/training/"),
    "hqq": ("workers/models/substitutes/quantize.py",),
    "huggingface_hub": ("workers/models/checkpoints/hub.py",),
    "torch": ("workers/",),
    "transformers": (
        "workers/models/transformers.py",
        "workers/training/",
        "runtime/tools/parser.py",
    ),
    "sklearn": ("workers/training/stratify.py",),
    "fastapi": ("runtime/http/",),
    "starlette": ("runtime/http/",),
    "uvicorn": ("runtime/http/serving/server.py",),
    "uvloop": ("launch/commands/http.py", "launch/commands/router.py"),
    "httptools": ("runtime/router/upstream.py",),
    "prometheus_client": ("runtime/http/exposition.py",),
    "gguf": (),
    "llama_cpp": (),
    "click": ("launch/",),
    "ray": ("launch/processes/ray/",),
    "rich": ("launch/",),
    "matplotlib": ("launch/files/charts.py", "launch/profiling/figure.py"),
}
INSIDE_WORKERS = {
    "speculation": {"speculation", "devices"},
    "models": {"models", "kernels", "devices", "progress"},
    "devices": {"devices"},
}
OPENS_PICKLED_WEIGHTS = "workers/heads/files.py"
"""The one file that may call torch.load, and only with weights_only=True: the public draft heads
are pickled, and the user has to ask for it."""
SORTED = ("launch", "workers", "runtime")
"""The folders that have few entries at the top, since they have rooms."""
MOST_ENTRIES = 20
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


class Read(NamedTuple):
    """Facts of a file; its tree is not kept, since every collection of garbage would go through the
    trees of all files."""

    imported: list[str]
    """Full names of everything that it imports, wherever in it."""
    at_run_time: set[str]
    """Full names of what it imports, but for that which it imports for types alone."""


@cache
def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def read(path: Path) -> Read:
    """Parse a file, once for all tests."""
    all_of_it = list(statements(ast.parse(path.read_text(encoding="utf-8"))))
    return Read(
        [name for node, _ in all_of_it for name in imported_by(node)],
        {name for node, typed in all_of_it if not typed for name in imported_by(node)},
    )


def statements(node: ast.AST, typed: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every statement below a node, and whether it is for types alone."""
    for block in ("body", "handlers", "cases", "orelse", "finalbody"):
        inner = getattr(node, block, ())
        if isinstance(inner, list):
            aside = typed or (block == "body" and for_types(node))
            for statement in inner:
                yield statement, aside
                yield from statements(statement, aside)


def for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def imported_by(node: ast.AST) -> Iterator[str]:
    """Full names of everything that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{ast.unparse(node)} is relative"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_file_imports_only_what_its_folder_may(folder: str) -> None:
    for path in sources():
        for imported in read(path).imported if name(path).startswith(f"{folder}/") else ():
            first, _, rest = imported.partition(".")
            if first == "dovetail":
                assert rest.split(".")[0] in MAY_IMPORT[folder], f"{name(path)} imports {imported}"
            assert first not in FOLDERS, f"{name(path)} imports {imported}: twin classes"


def test_a_library_is_imported_only_at_its_door() -> None:
    for path in sources():
        for library in {imported.split(".")[0] for imported in read(path).imported}:
            doors = DOORS.get(library)
            assert doors is None or name(path).startswith(doors), (
                f"{name(path)} imports {library}; its door is {' or '.join(doors or ())}"
            )
            assert library not in PICKLES, f"{name(path)} imports {library}"


@pytest.mark.parametrize("room", INSIDE_WORKERS)
def test_the_rooms_of_workers_do_not_import_each_other(room: str) -> None:
    files = [path for path in sources() if name(path).startswith(f"workers/{room}/")]
    assert files
    for path in files:
        for imported in read(path).imported:
            if imported.startswith("dovetail.workers."):
                assert imported.split(".")[2] in INSIDE_WORKERS[room], (
                    f"{name(path)} imports {imported}"
                )


LONGEST_HEAD = 200


def test_a_kind_of_head_is_one_short_file() -> None:
    for kind in (kind for kind in sources() if name(kind).startswith("workers/heads/")):
        text = kind.read_text(encoding="utf-8")
        if "(HeadKind):" in text:
            lines = len(text.splitlines())
            assert lines <= LONGEST_HEAD, f"{name(kind)} has {lines} lines"


def test_every_package_is_listed() -> None:
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
            "packages"
        ]
    )
    there = {
        "dovetail." + name(path.parent).replace("/", ".")
        for path in sources()
        if path.name == "__init__.py"
    }
    assert listed == there


def test_no_file_loads_a_pickle() -> None:
    forbidden = ("torch.load", "recv_pyobj", "send_pyobj", "trust_remote_code=True")
    for path in sources():
        text = path.read_text(encoding="utf-8")
        if name(path) == OPENS_PICKLED_WEIGHTS:
            assert (
                text.count("torch.load")
                == len([call for call in calls(path, "torch.load") if loads_weights_only(call)])
                == 1
            )
            text = text.replace("torch.load", "")
        assert not any(word in text for word in forbidden), name(path)


def calls(path: Path, function: str) -> Iterator[ast.Call]:
    """All calls of a function in a file, by its dotted name."""
    yield from (
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function
    )


def loads_weights_only(call: ast.Call) -> bool:
    return any(
        keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True"
        for keyword in call.keywords
    )


def graph() -> dict[str, set[str]]:
    """The files that each file imports, by name, wherever in it; what is imported for types alone
    is left out."""
    files = {
        name(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in sources()
    }
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        named = {imported.removeprefix("dovetail.") for imported in read(path).at_run_time}
        whole = {one if one in files else one.rpartition(".")[0] for one in named}
        found[module] = whole & files.keys() - {module}
    return found


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions count: a circle that is closed late is a circle."""
    left = graph()
    while ready := [module for module, needs in left.items() if not needs]:
        for module in ready:
            del left[module]
        for needs in left.values():
            needs.difference_update(ready)
    assert not left, f"in circles, or above one: {sorted(left)}"


def rooms(folder: str) -> list[str]:
    """Every package below a folder."""
    return sorted(name(path.parent) for path in (ROOT / folder).rglob("*/__init__.py"))


@pytest.mark.parametrize("folder", [*SORTED, *rooms("workers")])
def test_a_folder_has_at_most_twenty_entries(folder: str) -> None:
    """A reader finds the file by its name alone; what git ignores is not counted."""
    there = {
        name(path).removeprefix(f"{folder}/").split("/")[0]
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(there) <= MOST_ENTRIES, f"{folder} has {len(there)}: {', '.join(sorted(there))}"


BUDGET = tomllib.loads((ROOT / "tests" / "budget.toml").read_text(encoding="utf-8"))
EXTRAS = tuple(room for rooms in BUDGET["extras"].values() for room in rooms)


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_a_folder_keeps_to_its_budget_of_lines() -> None:
    lines = dict.fromkeys((*FOLDERS, "tests"), 0)
    for path in (*sources(), *(ROOT / "tests").rglob("*.py")):
        lines[name(path).split("/")[0]] += lines_of(path)
    over = {folder: count for folder, count in lines.items() if count > BUDGET[folder]}
    assert not over, f"lines above tests/budget.toml: {over}; look for what can go"


def test_the_core_keeps_to_its_budget_of_lines() -> None:
    lines = {
        room: sum(map(lines_of, ROOT.glob(room if "*" in room else f"{room}/**/*.py")))
        for room in BUDGET["core"]["rooms"]
    }
    print(*(f"{count:>6} {room}" for room, count in lines.items()), sep="\n")
    print(f"{sum(lines.values()):>6} lines of core")
    assert all(lines.values()), lines
    assert sum(lines.values()) <= BUDGET["core"]["lines"], lines


def extra_of(path: str) -> str | None:
    """The entry of the extras that a path belongs to."""
    return next((room for room in EXTRAS if f"{path}/".startswith(f"{room}/")), None)


def test_only_an_extra_imports_an_extra() -> None:
    """For types, too; `dovetail.launch.extras` imports them by name."""
    assert all((ROOT / room).exists() for room in EXTRAS)
    for path in (path for path in sources() if extra_of(name(path)) is None):
        for imported in read(path).imported:
            module = imported.removeprefix("dovetail.").replace(".", "/")
            for place in (f"{module}.py", f"{module.rpartition('/')[0]}.py", module):
                assert extra_of(place) is None, f"{name(path)} imports {imported}"


def test_nobody_but_the_devices_asks_whether_a_device_is_one_of_nvidias() -> None:
    for path in sources():
        if name(path).startswith("workers/") and not name(path).startswith("workers/devices/"):
            text = path.read_text(encoding="utf-8")
            assert 'startswith("cuda' not in text, name(path)
            assert '== "cuda' not in text, name(path)


def test_a_class_name_stands_once_in_launch() -> None:
    trees = [
        ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "launch").rglob("*.py")
    ]
    names = [n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    assert sorted(name for name in {*names} if names.count(name) > 1) == []
