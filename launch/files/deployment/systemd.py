"""Hardened units of systemd for the processes of `dovetail serve`, on their cores, within their
memory, with a watchdog."""

import grp
import pwd
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote

from dovetail.launch.files.deployment.containers import (
    DeployedProcess,
    Destination,
    keeping,
    key_files,
    local_host,
    parts_of,
    settled,
    text,
    whole_model,
)
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.child import LET_GO
from dovetail.launch.processes.supervise import GRACE_S
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.http_keys import read_keys
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import Settings

GROUP = "dovetail.target"
USER = "dovetail"  # the user of the units, who exists while they run
SOCKET = "ipc:///run/dovetail/coordinator"
STATE = "/var/lib/dovetail"
"""A folder for the coordinator's files; systemd makes it for the unit's user."""
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""Folders hidden from a hardened unit."""
WATCHDOG = 3
"""Multiple of `coordinator.stuck_s` after which systemd ends a stuck worker."""
DEPTH = 3  # the number of package folders above this file
UNPRIVILEGED = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
STOP_S = round(3 * GRACE_S)
UNPLAIN = re.compile(r"[^\w@%+=:,./-]")


def systemd_units(configuration: Configuration) -> dict[str, str]:
    """Return file name -> text of the units for these settings on this machine. `UserError` for a
    model that is not here, `SettingsError` and `KeysError` for keys that are missing."""
    configuration = settled(configuration)
    settings = configuration.settings
    read_keys(settings.http)
    listen = settings.coordinator.listen
    tcp = listen.startswith("tcp://")
    if not tcp and listen not in ("ipc", SOCKET):
        remedy = f"leave it out ({SOCKET} is used), or write tcp://HOST:PORT"
        raise UserError(f"coordinator.listen = {listen!r}: {remedy}")
    if settings.http.port < (least := _least_port()):
        raise UserError(
            f"http.port = {settings.http.port}: ports below {least} are root's; choose a higher "
            "one, or lower net.ipv4.ip_unprivileged_port_start"
        )
    if settings.http.api_key_file:
        own = {"http.api_key_file": "/run/dovetail-http/api-keys"}
        configuration = configuration.over("the unit", own)
    configuration = keeping(configuration, "the unit", STATE)
    for anywhere in ("//0.0.0.0:", "//[::]:", "//*:"):
        listen = listen.replace(anywhere, "//127.0.0.1:")
    addresses = (listen, settings.coordinator.listen) if tcp else (SOCKET, SOCKET)
    there = Destination(*addresses, lambda name: f"/run/{_unit(name)}/keys", str)
    parts = parts_of(configuration, there)
    for model in sorted({model for part in parts for model in part.models}):
        _check_readable(model)
    files = {f"{_unit(part.name)}.service": _service(part, settings) for part in parts}
    return {GROUP: text("dovetail.target", group=GROUP, wants=" ".join(files)), **files}


def _check_readable(model: Path) -> None:
    """`UserError` for a model with a file that the units' user cannot read."""
    top = whole_model(model)
    files = [file for file in model.iterdir() if file.is_file()] if model.is_dir() else [model]
    folders = {folder for file in files for at in (file, file.resolve()) for folder in at.parents}
    if _hidden(top):  # systemd binds it as root, so the permissions of folders above do not matter
        tops = (top, top.resolve())
        folders = {folder for folder in folders if any(map(folder.is_relative_to, tops))}
    needs = {folder: "rx" if folder == model else "x" for folder in folders}
    for path, need in [*sorted(needs.items()), *((file, "r") for file in sorted(files))]:
        facts = path.stat()
        shift = _class_of(facts.st_uid, facts.st_gid)
        wanted = sum({"r": 4, "x": 1}[letter] for letter in need)
        if facts.st_mode >> shift & wanted != wanted:
            raise UserError(
                f"{path} has mode {stat.S_IMODE(facts.st_mode):04o}, and the units run as the user "
                f"{USER}, who cannot read it: `chmod {'ugo'[2 - shift // 3]}+{need} "
                f"{quote(str(path))}`"
            )


def _class_of(owner: int, group: int) -> int:
    """Return the shift of the permission bits that apply to the units' user: those of others,
    unless this machine has a user or a group of that name, which systemd then uses."""
    with suppress(KeyError):
        if owner == pwd.getpwnam(USER).pw_uid:
            return 6
    with suppress(KeyError):
        if group == grp.getgrnam(USER).gr_gid:
            return 3
    return 0


def _least_port() -> int:
    """Return the lowest port of this machine that needs no privilege: 1024 on a kernel without that
    setting."""
    try:
        return int(UNPRIVILEGED.read_text())
    except (OSError, ValueError):
        return 1024


def _service(part: DeployedProcess, settings: Settings) -> str:
    return text(
        "unit.service",
        part=part,
        title=_title(part),
        group=GROUP,
        user=USER,
        coordinator=_unit("coordinator"),
        keys=[*_keys(part, settings)],
        command=" ".join(map(_quoted, [*program(), *part.arguments])),
        watchdog=f"{WATCHDOG * settings.coordinator.stuck_s:g}",
        stop_s=STOP_S,
        let_go=LET_GO,
        rules=[*_folders(part), *_network(part, settings), *_resources(part)],
    )


def _resources(part: DeployedProcess) -> Iterator[str]:
    cores = format_numbers(sorted(part.place.cores))
    yield f"AllowedCPUs={cores}"
    if nodes := format_numbers(sorted(set(part.place.nodes))):
        policy = "bind" if len(part.place.nodes) == 1 or part.place.shards else "interleave"
        yield from (f"AllowedMemoryNodes={nodes}", f"NUMAPolicy={policy}", f"NUMAMask={nodes}")
    if part.memory is not None:
        if part.is_worker:
            yield "# estimated: weights while they load, keys and values of 8 long conversations"
        yield f"MemoryMax={part.memory}"
        yield "MemorySwapMax=0"
    elif part.is_worker:
        yield "# no MemoryMax: its weights are in a GPU's memory, or their size is not known"
    yield "TasksMax=512"


def _folders(part: DeployedProcess) -> Iterator[str]:
    if part.name == "coordinator":
        yield from ("RuntimeDirectory=dovetail", "RuntimeDirectoryMode=0700")
        yield from ("StateDirectory=dovetail", "StateDirectoryMode=0700")
    needed = {*installation(), *map(whole_model, part.models)}
    bound = sorted({path for path in needed if _hidden(path)})
    yield f"ProtectHome={'tmpfs' if bound else 'yes'}"
    yield from (f"BindReadOnlyPaths={_bound(path)}" for path in bound)


def _network(part: DeployedProcess, settings: Settings) -> Iterator[str]:
    tcp = settings.coordinator.listen.startswith("tcp://")
    if part.name != "http" and not tcp:
        yield from ("PrivateNetwork=yes", "RestrictAddressFamilies=AF_UNIX", "IPAddressDeny=any")
        return
    yield "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6"
    if part.is_worker or (part.name == "http" and local_host(settings.http.host)):
        yield from ("IPAddressDeny=any", "IPAddressAllow=localhost")
    else:
        yield "# no IPAddressDeny: it listens for other machines"


def _keys(part: DeployedProcess, settings: Settings) -> Iterator[str]:
    """Yield the lines that give a unit its keys: systemd reads them as root, and the process gets
    copies that only it can read."""
    copies = []
    if part.name == "http" and settings.http.api_key_file:
        path = Path(settings.http.api_key_file).expanduser().absolute()
        yield f"LoadCredential=api-keys:{_literal(path)}"
        copies.append(("api-keys", ""))
    if settings.coordinator.listen.startswith("tcp://"):
        if part.name == "coordinator":
            yield "# a peer whose key is made later needs a line of its own here, and in the next"
        folder = Path(settings.coordinator.keys).expanduser().absolute()
        for file in key_files(folder, part.name):
            yield f"LoadCredential={file.name}:{_literal(file)}"
            copies.append((file.name, "/keys"))
    if not copies:
        return
    own = _unit(part.name)
    yield f"RuntimeDirectory={own}"
    if part.name != "coordinator":
        yield "RuntimeDirectoryMode=0700"
    for below in dict.fromkeys(below for _, below in copies):
        names = " ".join(f"%d/{name}" for name, at in copies if at == below)
        made = "-D " if below else ""
        yield f"ExecStartPre=/usr/bin/install {made}-m 0400 -t /run/{own}{below} {names}"


def program() -> list[str]:
    """Return the command line of this installation of dovetail."""
    script = Path(sys.executable).with_name("dovetail")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "dovetail.launch.cli"]


def installation() -> set[Path]:
    """Return the folders of this installation: its environment, the interpreter, and the package
    itself, which is elsewhere in an editable installation."""
    here = Path(__file__)
    package = {here.parents[DEPTH], here.resolve().parents[DEPTH]}
    return {Path(sys.prefix), Path(sys.base_prefix), *package}


def _hidden(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in HIDDEN)


def _unit(name: str) -> str:
    """Return the name of a unit, without its suffix; a worker's contains "worker", since
    `dovetail.target` is the group of all."""
    return f"dovetail-{name}" if name in ("coordinator", "http") else f"dovetail-worker-{name}"


def _title(part: DeployedProcess) -> str:
    if part.is_worker:
        return f"{part.name} worker"
    return "HTTP API" if part.name == "http" else part.name


def _literal(path: Path) -> str:
    """Return a path in which no specifier is replaced. `UserError` for one with a line break, which
    cannot be escaped."""
    if len(f"{path}".splitlines()) > 1:
        raise UserError(f"{str(path)!r} has a line break, which no unit can name: rename it")
    return str(path).replace("%", "%%")


def _bound(path: Path) -> str:
    """Return a path for a list of paths, in which colons are special and dollars are not."""
    escaped = re.sub(r'([\\":])', r"\\\1", _literal(path))
    return f'"{escaped}"' if UNPLAIN.search(escaped) else escaped


def _quoted(word: str) -> str:
    """Return a word of a command line for systemd: without specifiers, variables and line ends."""
    plain = word.replace("%", "%%").replace("$", "$$")
    if not UNPLAIN.search(plain):
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r") + '"'
