"""Gives a bare checkout its import name, here and in child processes."""

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

if (root := Path(__file__).resolve().parent.parent) and "dovetail" not in sys.modules:
    folder = Path(tempfile.mkdtemp(prefix="dovetail-import-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "dovetail").symlink_to(root, target_is_directory=True)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
