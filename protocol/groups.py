"""The control groups of a process and those around them (cgroups(7)): version 2, version 1, or
both.

Standard library only; the file system root can be replaced for tests."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


class GroupFolders:
    """The folders of this process's control groups.

    In a container the own group is often the root while /proc gives the path on the host, so paths
    that do not exist are skipped."""

    def __init__(self, root: Path = ROOT) -> None:
        self._mount = root / "sys/fs/cgroup"
        self._paths: dict[str, str] = {}
        for line in read_text(root / "proc/self/cgroup").splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            self._paths.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))

    def folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders of our groups, innermost first; controller "": version 2."""
        if controller not in self._paths:
            return
        for mount in (
            [self._mount / controller] if controller else [self._mount, self._mount / "unified"]
        ):
            group = mount / self._paths[controller]
            yield from (
                folder
                for folder in (group, *group.parents)
                if folder.is_relative_to(mount) and folder.is_dir()
            )


def read_text(path: Path) -> str:
    """Return the content of a kernel file; empty if it is missing or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
