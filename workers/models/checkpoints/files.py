"""The files of a model folder: strictly parsed JSON, and which of them hold weights."""

import errno
import json
from pathlib import Path
from typing import Any

from dovetail.protocol.arrays import MAX_ARRAY_BYTES
from dovetail.protocol.errors import CheckpointError

MODEL_FILES = (
    "a model is a GGUF file, or a folder with config.json, tokenizer.json and *.safetensors"
)
LONGEST_SHOWN = 60  # characters of a value in an error
MAX_FILE_BYTES = MAX_ARRAY_BYTES  # largest configuration or tokenizer: twice the largest known


def damaged(text: str) -> CheckpointError:
    """Return the error for a missing or wrong part of a model folder."""
    return CheckpointError(f"{text}; fetch the model again")


def shown(value: object) -> str:
    """Return a value's form in an error."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def reason(error: BaseException) -> str:
    """Return an error's first lines as one: some libraries begin with only the location."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).removeprefix("Error while deserializing header: ")
    return " ".join(" ".join(text.split("\n")[:3]).split())[:300] or type(error).__name__


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; `CheckpointError` if the file holds none."""
    text = read_bytes(file)
    if not text.strip():
        raise damaged(f"{file} is empty")
    try:
        content = json.loads(text)
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{text[error.start]:02x}"
        raise damaged(f"{file} is not UTF-8 text: {byte}") from None
    except json.JSONDecodeError as error:
        why = f"{error.msg}, line {error.lineno} column {error.colno}"
        raise damaged(f"{file} is not JSON ({why})") from None
    except (ValueError, RecursionError):
        raise damaged(f"{file} is nested too deeply, or has a number that is too long") from None
    if not isinstance(content, dict):
        raise damaged(f"{file} does not contain a JSON object, but {shown(content)}")
    return content


def read_bytes(file: Path) -> bytes:
    """Return a file's content; `CheckpointError` if it cannot be read, or is a pipe."""
    try:
        if file.is_fifo():
            raise OSError(None, "it is not a file")
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}; {MODEL_FILES}") from None
    except OSError as error:
        raise unreadable(file, error) from None
    if len(content) > MAX_FILE_BYTES:
        raise damaged(f"{file} exceeds {MAX_FILE_BYTES >> 20} MiB")
    return content


def unreadable(file: Path, error: OSError) -> CheckpointError:
    """The error for a file of a model that we may not read."""
    remedy = (
        "let your user read it"
        if error.errno in (errno.EACCES, errno.EPERM)
        else "fetch the model again"
    )
    return CheckpointError(f"{file} cannot be read ({reason(error)}); {remedy}")
