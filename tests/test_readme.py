"""The links, paths, commands, options, settings and tables of the README files exist and are
right."""

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from measures import words

from benchmarks.commands import COMMANDS as COMMANDS_OF_BENCHMARKS
from dovetail.launch.cli import COMMANDS
from dovetail.launch.console.help import common
from dovetail.launch.settings.configure import SETTINGS
from dovetail.protocol.messages import VERSION
from dovetail.workers.devices import registry

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "tests/*.md",
        "tests/*/*.md",
        *(f"{top}/**/*.md" for top in words.FOLDERS),
    )
    for path in ROOT.glob(pattern)
    if "heads" not in path.parts[:-2] and path.name != "ATTRIBUTION.md"
)
READ = {str(path.relative_to(ROOT)): path for path in words.pages(ROOT)}
"""Pages that people read from start to end, by name."""
BUDGET = tomllib.loads((ROOT / "tests" / "budget.toml").read_text(encoding="utf-8"))
MOST_LINES, MOST_COLUMNS, LONGEST_HEADING = 200, 100, 80
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
PROGRAM = re.compile(r"`(python tests/[^`]+)`")
OPTION = re.compile(r"--[a-z][\w.-]*")
OTHERS = (
    "pip",
    "hf ",
    "vllm",
    "guidellm",
    "python",
    "accelerate",
    "openssl",
    "curl",
    "apt",
    "--cap-",
)
"""Beginnings of code that is about other programs."""
TOP = ("launch", "protocol", "runtime", "tests", "workers")


@pytest.fixture(params=PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@cache
def commands() -> dict[str, click.Command]:
    """Every command as it is typed, such as `train dovetail`."""
    modules = {
        name: importlib.import_module(f"dovetail.launch.commands.{name}") for name in COMMANDS
    }
    return dict(_leaves("", {name: module.command for name, module in modules.items()}))


def _leaves(above: str, group: dict[str, click.Command]) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.items():
        yield f"{above}{name}", command
        if isinstance(command, click.Group):
            yield from _leaves(f"{above}{name} ", command.commands)


def options_of(command: click.Command) -> set[str]:
    own = {opt for p in command.params for opt in (*p.opts, *p.secondary_opts)}
    return own | {"-h", "--help", "--help-all"}


@cache
def programs_options() -> set[str]:
    """The options of the programs among the tests, as their sources name them."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*/**/*.py"))
    return {option for source in sources for option in re.findall(r'"(--[a-z][\w-]*)', source)}


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def shell_lines(text: str) -> Iterator[str]:
    """Lines of the shell blocks, without their comments."""
    for language, block in FENCE.findall(text):
        if language == "sh":
            yield from (re.sub(r"\s+#.*$", "", line) for line in block.splitlines() if line.strip())


def inline(text: str) -> list[str]:
    """Return what is written as code within sentences and tables."""
    return CODE.findall(FENCE.sub("", text))


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = LINK.sub("", words.prose(text)).split()
    assert len(text.splitlines()) <= MOST_LINES
    assert len([word for word in prose if re.search(r"\w", word)]) <= BUDGET["pages"]["README.md"]


@pytest.mark.parametrize("name", READ)
def test_a_page_is_short_and_so_are_its_sentences(name: str) -> None:
    """A folder's manual and a page of one theme have budgets; `python tests/measures/words.py`
    counts words and long sentences."""
    text = READ[name].read_text(encoding="utf-8")
    if name != "README.md":
        kind = "manual" if name.count("/") == 1 else "theme"
        assert len(text.split()) <= BUDGET["pages"].get(name, BUDGET["pages"][kind])
    assert words.long_sentences(text) == []


def test_private_words_become_fewer() -> None:
    """To raise a figure is a commit with its reason."""
    over = {
        folder: found.total()
        for folder in words.FOLDERS
        if (found := words.counts(ROOT, folder)[0]).total() > BUDGET["words"][folder]
    }
    assert not over, f"words of tests/measures/words.py above tests/budget.toml: {over}"


def test_prose_is_no_wider_than_code(page: Path) -> None:
    if page.name == "MESSAGES.md" or "heads" in page.parts:
        return
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    prose = [line for line in text.splitlines() if not line.startswith(("|", "!["))]
    assert [line for line in prose if len(line) > MOST_COLUMNS] == []


def test_a_heading_has_its_line_to_itself(page: Path) -> None:
    lines = FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    headings = [place for place, line in enumerate(lines) if line.startswith("#")]
    assert [lines[place] for place in headings if "".join(lines[place + 1 : place + 2])] == []
    assert [lines[place] for place in headings if len(lines[place]) > LONGEST_HEADING] == []


def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {link}"


def test_paths_are_there(page: Path) -> None:
    for code in inline(page.read_text(encoding="utf-8")):
        name = code.split()[0].partition("::")[0].rstrip("/")
        ours = name.startswith(tuple(f"{top}/" for top in TOP))
        if (ours or re.fullmatch(r"[\w/]+\.py", name)) and not re.search(r"[*<>|A-Z{]", name):
            above = [at for at in page.parents if at.is_relative_to(ROOT)]
            assert any((at / name).exists() for at in above), f"{page.name}: {code}"


def typed(page: Path) -> Iterator[tuple[str, str, set[str]]]:
    """Commands of ours that a page has: the line, the command, its options."""
    text = page.read_text(encoding="utf-8")
    lines = [line for line in shell_lines(text) if "dovetail " in line] + [
        code for code in inline(text) if code.startswith("dovetail ")
    ]
    for line in lines:
        for part in re.findall(r"(?:^|&& |\.venv/bin/)dovetail (.*?)(?:$| && )", line):
            words = shlex.split(part.replace("...", ""))
            if not words or words[0].startswith("-") or words[0].isupper():
                continue
            names = (" ".join(words[:length]) for length in (3, 2, 1))
            name = next((name for name in names if name in commands()), "")
            assert name, f"{page.name}: {line}"
            yield line, name, {word.partition("=")[0] for word in words if OPTION.match(word)}


def test_commands_and_their_options_are_there(page: Path) -> None:
    for line, name, named in typed(page):
        assert named <= options_of(commands()[name]), f"{page.name}: {line}"


def test_help_shows_the_options_that_the_first_page_teaches() -> None:
    taught = [*typed(ROOT / "README.md")]
    assert {"--limit"} <= {option for *_, named in taught for option in named}
    for line, name, named in taught:
        command = commands()[name]
        options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        assert named <= {opt for p in common(options) for opt in p.opts}, line


def test_options_in_sentences_are_there(page: Path) -> None:
    known = {opt for command in commands().values() for opt in options_of(command)}
    known |= programs_options() | {"--version", "--index-url", "--check"}
    for code in inline(page.read_text(encoding="utf-8")):
        if code.startswith((*OTHERS, "dovetail ", "tests/", "pytest", "vllm")):
            continue
        named = {option.rstrip(".") for option in OPTION.findall(code)}
        assert named <= known, f"{page.name}: {code}"


def test_settings_and_variables_are_there(page: Path) -> None:
    sections = {name.partition(".")[0] for name in SETTINGS}
    variables = {setting.variable for setting in SETTINGS.values()}
    variables |= {"DOVETAIL_API_KEY", registry.VARIABLE}
    text = page.read_text(encoding="utf-8")
    for code in inline(text):
        for name in re.findall(r"(?<![\w./-])([a-z]+(?:\.[a-z_]+)+)\b", code):
            if name.partition(".")[0] in sections and not name.endswith(
                (".py", ".md", ".json", ".key", ".pub", ".toml", ".svg")
            ):
                assert name in SETTINGS or any(s.startswith(f"{name}.") for s in SETTINGS), name
    for variable in re.findall(r"\bDOVETAIL_\w+", text):
        assert variable in variables


def test_programs_of_the_tests_and_their_options_are_there(page: Path) -> None:
    """By their sources: importing all of them takes long."""
    text = page.read_text(encoding="utf-8")
    for line in [*shell_lines(text), *(" ".join(code.split()) for code in PROGRAM.findall(text))]:
        program = re.search(r"python tests/(\w+)(?!\S)(.*)", line)
        if program is None:
            continue
        folder, words = ROOT / "tests" / program[1], shlex.split(program[2].partition(";")[0])
        assert (folder / "__main__.py").exists(), f"{page.name}: {line}"
        words = words[: words.index("--")] if "--" in words else words
        files = [*folder.rglob("*.py")]
        if folder.name == "benchmarks":
            assert words[0].startswith("-") or words[0] in COMMANDS_OF_BENCHMARKS, line
            module = COMMANDS_OF_BENCHMARKS.get(words[0], ("commands", ""))[0].partition(".")[0]
            files = [folder / f"{module}.py", folder / "options.py"]
        sources = "".join(file.read_text(encoding="utf-8") for file in files)
        named = {word.partition("=")[0] for word in words if OPTION.match(word)} - {"--help"}
        settings = set()
        if folder.name in ("replay", "simulation"):
            settings = options_of(commands()["bench"])
        own = {*re.findall(r'"(--[a-z][\w-]*)', sources)}
        assert named <= own | settings, f"{page.name}: {line}"


def test_every_command_stands_in_the_manual() -> None:
    manual = (ROOT / "launch" / "README.md").read_text(encoding="utf-8")
    missing = [name for name in COMMANDS if f"dovetail {name}" not in manual]
    assert missing == [], "give each a line under Commands in launch/README.md"


def test_the_page_of_the_algorithm_is_quoted_as_it_is() -> None:
    readme = (ROOT / "workers" / "speculation" / "README.md").read_text(encoding="utf-8")
    (quoted,) = [block for language, block in FENCE.findall(readme) if language == "python"]
    source = (ROOT / "workers" / "speculation" / "decode.py").read_text(encoding="utf-8")
    assert "".join(quoted.split()) in "".join(source.split())


def test_the_command_that_continuous_integration_reads_is_there() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    after = readme.partition("<!-- the test command -->\n")[2]
    (first, *_) = FENCE.findall(after)
    assert after.startswith("```sh\n")
    assert first[1].count("\n") == 1
    assert ".venv/bin/python -m pytest" in first[1]


def test_trees_name_what_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        if section.splitlines()[:1] in (["The tree"], ["Files"], ["Rooms"]):
            (tree,) = [block for language, block in FENCE.findall(section) if not language]
            _check_tree(page.parent, tree)


def _check_tree(root: Path, tree: str) -> None:
    """Each line begins with names, those of a folder two columns deeper than its own; what they are
    follows after two spaces."""
    above = root
    for line in tree.splitlines():
        if line.startswith("   "):
            continue  # the rest of the line before
        names = re.split(r"\s{2,}", line.strip())[0].split()
        base = above if line.startswith(" ") else root
        for name in (n for n in names if re.fullmatch(r"[\w.]+(/|\.\w+)", n)):
            assert (base / name).exists(), f"{root.name}: {line}"
        if not line.startswith(" "):
            above = root / names[0]


def test_the_wire_is_described_in_the_version_that_is_spoken() -> None:
    first = (ROOT / "protocol" / "MESSAGES.md").read_text(encoding="utf-8").splitlines()[2]
    assert first.startswith(f"Protocol version {VERSION[0]}.{VERSION[1]}.")
