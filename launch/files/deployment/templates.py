"""Deployments are rendered from Jinja templates, one file each in `templates/`."""

from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

FOLDER = Path(__file__).with_name("templates")


def text(name: str, /, **facts: Any) -> str:
    """Render a template with these values; functions among them are filters, too."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {"quote": quote} | {
        name: fact for name, fact in facts.items() if callable(fact)
    }
    return environment.get_template(name).render(facts)


def documents(name: str, /, **facts: Any) -> str:
    """Return the YAML documents of a template as PyYAML lays them out, below the comment at the top
    of the template."""
    rendered = text(name, **facts)
    head = "".join(takewhile(lambda line: line.startswith("#"), rendered.splitlines(True)))
    body: str = yaml.safe_dump_all(yaml.safe_load_all(rendered), sort_keys=False, width=100)
    return head + body
