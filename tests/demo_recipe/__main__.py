"""The programs: `python tests/demo_recipe NAME --help`, with NAME one of text, prepare, questions."""

import importlib
import sys
from pathlib import Path

PROGRAMS = ("text", "prepare", "questions")

if __name__ == "__main__":
    sys.path[0] = str(
        Path(__file__).resolve().parent.parent
    )  # tests: what lies here is demo_recipe.NAME, and shadows no library
    if len(sys.argv) < 2 or sys.argv[1] not in PROGRAMS:
        sys.exit(f"python tests/demo_recipe NAME: NAME is one of {', '.join(PROGRAMS)}")
    sys.argv[:2] = [f"python tests/demo_recipe {sys.argv[1]}"]
    importlib.import_module(f"demo_recipe.{sys.argv[0].split()[-1]}").main()
