"""Gives a bare checkout its import name, here and in child processes; one running pair for all
tests that only ask it things."""

import atexit
import contextlib
import fcntl
import gc
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from dovetail.launch.processes.stack import Stack
    from dovetail.runtime.client import Client


def _own_folder() -> Path:
    """Return a folder that goes with this process; those of killed processes go too."""
    place = Path(tempfile.gettempdir())
    turn = os.open(place, os.O_RDONLY)
    fcntl.flock(turn, fcntl.LOCK_EX)  # no folder is seen between its making and its lock
    for left in place.glob("dovetail-tests-*"):
        with contextlib.suppress(OSError):
            _lock(left)
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="dovetail-tests-"))
    _lock(folder)
    os.close(turn)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _lock(folder: Path) -> None:
    """Hold a folder as long as this process lives; `OSError` if another one does."""
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise


own = _own_folder()
if (root := Path(__file__).resolve().parent.parent) and "dovetail" not in sys.modules:
    (own / "import").mkdir()
    (own / "import" / "dovetail").symlink_to(root, target_is_directory=True)
    sys.path.insert(0, str(own / "import"))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(own / "import"), os.environ.get("PYTHONPATH")))
    )

importlib.import_module("pretended").add()  # the device of tests, here and in child processes

# The threads of two processes on the same cores spin for each other while they wait; libgomp reads
# this when torch is imported, here and in child processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# no process of these tests writes to the caches of whoever runs them; pytest's workers share one
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = str(own / "cache")
    (own / "cache").mkdir()

# what one test learns about its draft must not reach the next test
os.environ.setdefault("DOVETAIL_COORDINATOR__REMEMBER", "false")

# Without bytecode on disk each of hundreds of processes would compile dovetail's sources anew, and
# each of pytest's workers would rewrite the assertions of all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A loaded machine fails no example and no strategy for taking long.
hypothesis.settings.register_profile(
    "dovetail", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("dovetail")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected: what is imported and made there stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_garbage() -> Iterator[None]:
    """Freeze what has been imported, which is no garbage: a collection, such as each load of a
    model makes, need not look through it again (a quarter second). At the end of a module collect,
    so that what it leaves open is told of its own last test."""
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture(scope="session")
def stack() -> Iterator["Stack"]:
    """The embedded pair, running; the imports wait for the name that they need, and for a test that
    asks."""
    from support.stacks import started

    with started({"draft.device": "cpu"}) as (stack, _):
        yield stack


@pytest.fixture(scope="module")
def client(stack: "Stack") -> Iterator["Client"]:
    """A client of the embedded pair."""
    with stack.connect() as connected:
        yield connected
