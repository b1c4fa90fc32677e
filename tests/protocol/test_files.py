"""A file that the system refuses to read or write is told with its name, the place in it and a
remedy."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.protocol import files
from dovetail.protocol.errors import OutputError, UserError
from dovetail.protocol.files import append, decode, read_text, tidy, writing


@pytest.fixture
def short_files() -> Iterator[None]:
    """No file of this process can have more than 4096 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refusal(path: Path, text: str = "x" * 8192) -> str:
    with pytest.raises(OutputError) as caught, writing(path, "the plot"):
        path.write_text(text)
    return str(caught.value)


def test_a_full_disk_is_told_with_the_name_of_the_file_and_a_remedy() -> None:
    found = refusal(Path("/dev/full"))
    assert (
        found == "cannot write the plot to /dev/full: No space left on device; free some space "
        "there, or choose another place"
    )


def test_so_is_every_other_refusal(tmp_path: Path, short_files: None) -> None:
    assert refusal(tmp_path / "a").endswith(
        "File too large; raise the limit of a file's size (ulimit -f), or choose another place"
    )
    assert refusal(tmp_path).endswith("Is a directory; that is a folder: name a file")
    assert refusal(tmp_path / "no" / "such").endswith(
        "No such file or directory; make its folder first"
    )
    assert refusal(tmp_path / "a" / "b").endswith(
        "Not a directory; a part of that path is a file: name a folder before the last /"
    )
    assert refusal(tmp_path / ("n" * 300)).endswith("File name too long; choose a shorter name")
    theirs = PermissionError(errno.EACCES, "refused", str(files.cache_folder() / "x"))
    assert files.refusal(theirs, writes=False).startswith("refused; set XDG_CACHE_HOME to a folder")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(errno.ENOENT, "absent", "/proc/self/no"), "absent"),
        (FileNotFoundError(errno.ENOENT, "absent", "/no/such"), "absent"),
        (PermissionError(errno.EPERM, "refused"), "refused"),
        (PermissionError(errno.EACCES, "refused", "/etc/shadow"), "refused"),
        (PermissionError(errno.EACCES, "refused", "dovetail/plot"), "refused"),
        (
            OSError(errno.EROFS, "refused", "/x"),
            "refused; that disk is read-only: choose another place",
        ),
        (OSError(errno.EMFILE, "many"), "many; raise the limit of open files (ulimit -n)"),
        (OSError(errno.EINVAL, "wrong", 7), "wrong"),
    ],
)
def test_what_was_not_written_has_no_remedy_of_writing(
    error: OSError, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert files.refusal(error, writes=False) == words


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_of_somebody_else_is_told() -> None:
    assert "let your user write there" in refusal(Path("/etc/dovetail"))


def test_what_is_appended_is_refused_at_once_and_leaves_nothing_for_the_end(
    tmp_path: Path, short_files: None
) -> None:
    path = tmp_path / "lines"
    with path.open("a+b") as file:
        append(file, path, "the answers", b"x" * 4000)
        with pytest.raises(
            OutputError,
            match=f"^cannot write the answers to {path}: File too large; raise the limit",
        ):
            append(file, path, "the answers", b"y" * 200)
    assert path.read_bytes() == b"x" * 4000 + b"y" * 96


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "a\nb\u00e9".encode("latin-1"),
            r"here is not UTF-8 text: byte 3 \(line 2\) is 0xe9; save it as UTF-8.*iconv",
        ),
        (b"\xef\xbb\xbfab\n\xff", r"byte 6 \(line 2\) is 0xff"),
        ("hello\n".encode("utf-16"), r"here is UTF-16 text.*save it as UTF-8.*iconv"),
        (
            "hello\n".encode("utf-16-le"),
            r"byte 1 \(line 1\) is zero, as in UTF-16 or a binary file; save it",
        ),
        ("hello\n".encode("utf-32"), r"here is UTF-32 text.*iconv -f UTF-32"),
        (b"\x7fELF\x02\x00", r"byte 5 \(line 1\) is zero.*binary"),
    ],
)
def test_text_that_is_not_utf_8_is_named_by_line_and_byte(content: bytes, words: str) -> None:
    with pytest.raises(UserError, match=words):
        decode(content, "here")


def test_a_byte_order_mark_is_no_part_of_a_text() -> None:
    assert decode("\ufeffé\n".encode(), "here") == "é\n"
    assert decode(b"a\0b", "here", zeros=True) == "a\0b"


def test_a_folder_keeps_what_was_changed_last_whatever_others_take_away_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        path = tmp_path / f"{number}"
        path.mkdir() if number % 2 else path.touch()
        os.utime(path, (number, number))
    gone = tmp_path / "another's.lock"
    listed = [*tmp_path.iterdir(), gone]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", lambda _: iter(listed))
        tidy(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


def test_a_file_too_large_to_be_hand_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.toml"
    path.touch()
    os.truncate(path, 3 << 30)
    with pytest.raises(UserError, match=r"the settings file is larger than 16 MiB"):
        read_text(path, "the settings file")
