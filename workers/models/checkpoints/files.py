"""The files of a model folder: strictly parsed JSON, and which of them hold weights."""

import errno
import json
from pathlib import Path
from typing import Any

from dovetail.protocol.arrays import MAX_ARRAY_BYTES
from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.architecture import MODEL_FILES, reason, shown

MAX_FILE_BYTES = MAX_ARRAY_BYTES  # largest configuration or tokenizer: twice the largest known


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; `CheckpointError` if the file holds none."""
    text = read_bytes(file)
    if not text.strip():
        raise CheckpointError(f"{file} is empty; fetch the model again")
    try:
        content = json.loads(text)
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{file} is not UTF-8 text: byte {error.start} is 0x{text[error.start]:02x}; fetch "
            "the model again"
        ) from None
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{file} is not JSON ({error.msg}, line {error.lineno} column {error.colno}); fetch "
            "the model again"
        ) from None
    except (ValueError, RecursionError):
        raise CheckpointError(
            f"{file} is nested too deeply, or has a number that is too long; fetch the model again"
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file} holds no JSON object but {shown(content)}; fetch the model again"
        )
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
        raise CheckpointError(f"{file} exceeds {MAX_FILE_BYTES >> 20} MiB; fetch the model again")
    return content


def unreadable(file: Path, error: OSError) -> CheckpointError:
    """The error for a file of a model that we may not read."""
    remedy = (
        "let your user read it"
        if error.errno in (errno.EACCES, errno.EPERM)
        else "fetch the model again"
    )
    return CheckpointError(f"{file} cannot be read ({reason(error)}); {remedy}")
