"""The control group of a process and those around it (cgroups(7)), of the second kind, of the
first, or of both.

Read under a root that can be another one. Standard library only; what the files mean, their readers
know.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


class GroupFolders:
    """The folders of this process's control groups.

    A container often sees its own group as the root, while /proc names the path on the host: what
    is not there is passed over.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._mount = root / "sys/fs/cgroup"
        self._paths: dict[str, str] = {}
        for line in read_text(root / "proc/self/cgroup").splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            self._paths.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))

    def folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders of our groups, innermost first; controller "": the second kind."""
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
    """A file of the kernel's; empty if it is not there or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
