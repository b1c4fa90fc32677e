"""The files of `config export` with a standby: what they say of it, and that their very commands go
on when the coordinator is killed."""

import contextlib
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dovetail.launch.files.deployment.compose import compose_file
from dovetail.launch.files.deployment.kubernetes import kubernetes_manifest
from dovetail.launch.files.deployment.systemd import systemd_units
from dovetail.protocol.keys import generate_keys, generate_peer
from support import deployed
from support.by_hand import ByHand, Stream, bodies, ended, together, why_not
from support.deployed import parsed, settings

API_KEY = "a-key-of-at-least-16-characters"
Run = Callable[..., "subprocess.CompletedProcess[str]"]
Commands = dict[str, tuple[str, list[str]]]
"""A process by a name of its own -> its host and its command."""


def test_a_compose_file_has_a_standby_that_is_reached_as_the_coordinator_is() -> None:
    content = yaml.safe_load(compose_file(settings(draft__kind="ngram"), standby=True))
    jsonschema.validate(content, deployed.COMPOSE)
    one, other = (content["services"][name] for name in ("coordinator", "standby"))
    assert [*one["command"], "--standby-of=tcp://coordinator:5555"] == other["command"]
    assert (one["hostname"], other["hostname"]) == ("coordinator", "standby")
    assert {name: one[name] for name in ("networks", "secrets", "restart")} == {
        name: other[name] for name in ("networks", "secrets", "restart")
    }
    assert {*one["volumes"]}.isdisjoint(other["volumes"])
    for name, service in content["services"].items():
        given = parsed(service["command"])
        assert {*service["secrets"]} <= {*content["secrets"]}
        assert ("default" in service["networks"]) == (name == "http")
        if service not in (one, other):
            assert given["connect"] == "tcp://coordinator:5555,tcp://standby:5555"
            assert "coordinator.key" not in service["secrets"]
    assert content["networks"] == {"links": {"internal": True}}


def test_a_manifest_has_a_standby_in_a_pod_of_its_own_that_serves_too(tmp_path: Path) -> None:
    text = kubernetes_manifest(settings(draft__kind="ngram"), standby=True)
    deployed.check_built(text, tmp_path)
    group, api, *found, standby = yaml.safe_load_all(text)
    jsonschema.validate(group, deployed.LEADER_WORKER_SET)
    jsonschema.validate(standby, deployed.STATEFUL_SET)
    for service in (api, *found):
        jsonschema.validate(service, deployed.SERVICE)
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    second = standby["spec"]["template"]
    names = ["dovetail-0", f"{standby['metadata']['name']}-0"]
    assert [one["metadata"]["name"] for one in found] == names
    assert standby["spec"]["serviceName"] == names[1]

    def chosen(selector: dict[str, str]) -> list[Any]:
        return [p for p in (leader, worker, second) if selector.items() <= labels(p).items()]

    def labels(pod: Any) -> dict[str, str]:
        return dict(pod["metadata"]["labels"])

    assert chosen(api["spec"]["selector"]) == [leader, second]
    assert [chosen(one["spec"]["selector"]) for one in found] == [[leader], [second]]
    assert chosen(standby["spec"]["selector"]["matchLabels"]) == [second]
    hub, server = second["spec"]["containers"]
    own, *others = leader["spec"]["containers"]
    assert [*own["args"], f"--standby-of=tcp://{names[0]}:5555"] == hub["args"]
    for container in (*others, *worker["spec"]["containers"], server):
        given = parsed(container["args"])
        assert given["connect"] == ",".join(f"tcp://{name}:5555" for name in names)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder of keys with a file of API keys in it, whose names are words of a shell."""
    folder = tmp_path / "some keys"
    generate_keys(folder)
    (folder / "api keys").write_text(f"{API_KEY}\n")
    (folder / "api keys").chmod(0o600)
    return folder


def test_keys_that_are_here_are_those_of_the_containers(keys: Path) -> None:
    """Their folder and their names go into the files; the file of API keys is not made anew."""
    generate_peer(keys, "laptop", ("client",))
    file = keys / "api keys"
    named = settings(coordinator__keys=str(keys), http__api_key_file=str(file))
    made = f"test -e '{file}' || (umask 077; openssl rand -hex 32 > '{file}')"
    text = compose_file(named, standby=True)
    assert made in text
    secrets = yaml.safe_load(text)["secrets"]
    assert secrets["api-keys"] == {"file": str(file)}
    assert secrets["laptop.pub"] == {"file": f"{keys}/laptop.pub"}
    text = kubernetes_manifest(named)
    assert made in text
    assert f"dovetail keygen --out '{keys}'\n" in text
    for own, other in (("http-keys", "draft.key"), ("coordinator-keys", "api-keys")):
        command = text.partition(f"secret generic dovetail-{own} ")[2].replace("\\\n#", "")
        words = shlex.split(command.partition("\n")[0])
        files = dict(word.removeprefix("--from-file=").split("=") for word in words)
        assert files["coordinator.pub"] == str(keys / "coordinator.pub")
        assert other not in files
        assert {"http-keys": "api-keys", "coordinator-keys": "laptop.pub"}[own] in files


@pytest.mark.parametrize("what", ["compose", "kubernetes"])
def test_keys_that_others_can_read_are_refused_as_by_serve(
    invoke: Run, what: str, keys: Path
) -> None:
    asked = ("config", "export", what, "--standby", "--keys", str(keys))
    (keys / "draft.key").chmod(0o640)
    (keys / "api keys").chmod(0o640)
    said = invoke(*asked, "--draft", "ngram")
    assert (said.returncode, f"chmod 600 {keys}/draft.key" in said.stderr) == (2, True)
    said = invoke(*asked, "--http.api_key_file", str(keys / "api keys"))
    command = f"chmod 600 {shlex.quote(str(keys / 'api keys'))}"
    assert (said.returncode, command in said.stderr) == (2, True)


# -- processes -------------------------------------------------------------------------------------


def of_compose() -> Commands:
    content = yaml.safe_load(compose_file(settings(draft__kind="ngram"), standby=True))
    return {
        name: (service.get("hostname", f"{name}-container"), service["command"])
        for name, service in content["services"].items()
    }


def of_kubernetes() -> Commands:
    text = kubernetes_manifest(settings(draft__kind="ngram"), standby=True)
    group, *_, standby = yaml.safe_load_all(text)
    template = group["spec"]["leaderWorkerTemplate"]
    pods = {
        "dovetail-0": template["leaderTemplate"],
        "dovetail-0-1": template["workerTemplate"],
        "dovetail-standby-0": standby["spec"]["template"],
    }
    found: Commands = {}
    for host, pod in pods.items():
        for container in pod["spec"]["containers"]:
            name = container["name"]
            name = name if name not in found else {"coordinator": "standby"}.get(name, "second")
            found[name] = host, container["args"]
    return found


def of_systemd(folder: Path) -> Commands:
    """The units of two machines, and a target by hand on a third one: those of the coordinator's
    machine do not decide."""
    generate_keys(folder)
    there = {"coordinator__listen": "tcp://0.0.0.0:5555", "coordinator__keys": str(folder)}
    asked = settings(**there, draft__kind="ngram")
    first = systemd_units(asked, standby="tcp://second:5555")
    found = {name: ("first", started(first, name)) for name in UNITS}
    second = systemd_units(asked, "tcp://first:5555")
    return {
        **found,
        "standby": ("second", started(second, "coordinator")),
        "spare": ("third", found["target"][1]),
    }


UNITS = ("coordinator", "http", "target", "draft")


def started(units: dict[str, str], name: str) -> list[str]:
    """Return what a unit starts, behind the program."""
    unit = next(text for file, text in units.items() if file.endswith(f"-{name}.service"))
    (line,) = (line for line in unit.splitlines() if line.startswith("ExecStart="))
    words = shlex.split(line.removeprefix("ExecStart="))
    begin = next(n for n, word in enumerate(words) if word in ("coordinator", "http", "worker"))
    return [word.replace("127.0.0.1:5555", "first:5555") for word in words[begin:]]


class Deployed(ByHand):
    """The processes of an export on hosts of the names that they have there, all on this machine:
    each coordinator has a loopback address, where its name leads."""

    def __init__(self, folder: Path, commands: Commands) -> None:
        super().__init__(folder, ())
        self.commands = commands
        self._places = {commands[name][0]: f"127.0.0.{n}" for n, name in enumerate(HUBS, 2)}
        with contextlib.ExitStack() as held:
            found = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            self._port = found.getsockname()[1]
            also = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            self._http = also.getsockname()[1]
        names = "".join(f"{place} {host}\n" for host, place in self._places.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (folder / "api-keys").write_text(f"{API_KEY}\n")
        (folder / "api-keys").chmod(0o600)
        generate_keys(folder / "keys")
        for name, (host, _) in commands.items():
            here = f'hostname {host} && mount --bind {folder}/hosts /etc/hosts && exec "$@"'
            alone = ["unshare", "--user", "--map-root-user", "--uts", "--mount"]
            self.machines[name] = [*alone, "sh", "-c", here, "sh"]

    def begin(self, name: str) -> None:
        """Start a process as the export has it, but for ports, folders and cores."""
        host, command = self.commands[name]
        own = {"--coordinator.keys": f"{self.folder}/keys"}
        own |= {"--coordinator.listen": f"tcp://{self._places.get(host)}:{self._port}"}
        own |= {"--coordinator.journal": f"{self.folder}/journal-{name}"}
        own |= {"--http.api_key_file": f"{self.folder}/api-keys", "--http.host": "127.0.0.1"}
        words = []
        for word in command:
            flag = word.partition("=")[0]
            if not flag.startswith(("--cores", "--memory-nodes")):
                changed = f"{flag}={own[flag]}" if flag in own else word
                words.append(changed.replace(":5555", f":{self._port}"))
        words += [f"--http.port={self._http}"] if name == "http" else []
        words += ["--http.port=0"] if name == "second" else []
        words += ["--target.inflate=64MiB"] if name in ("target", "spare") else []
        process = self.start(name, *words)
        if name in (*HUBS, "http"):
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            assert line, (self.folder / f"{name}.log").read_text()
            self.url = line if name == "http" else self.url

    def says(self, name: str, words: str) -> None:
        end_s = time.monotonic() + 60.0
        while words not in (self.folder / f"{name}.log").read_text():
            assert time.monotonic() < end_s, (self.folder / f"{name}.log").read_text()
            time.sleep(0.05)


HUBS = ("coordinator", "standby")


@contextlib.contextmanager
def running(folder: Path, commands: Commands) -> Iterator[Deployed]:
    service = Deployed(folder, commands)
    with ended(service):
        for name in ("coordinator", "standby", *(n for n in commands if n not in HUBS)):
            service.begin(name)
        service.until_ready()
        yield service


@pytest.mark.slow
@pytest.mark.parametrize("what", ["compose", "kubernetes", "systemd"])
def test_streams_go_on_when_the_coordinator_of_an_export_is_killed(
    what: str, tmp_path: Path
) -> None:
    if reason := why_not():
        pytest.skip(f"namespaces are not permitted here: {reason}")
    asked, exports = bodies(2, 150), {"compose": of_compose, "kubernetes": of_kubernetes}
    commands = exports[what]() if what in exports else of_systemd(tmp_path / "exported")
    with running(tmp_path, commands) as service:
        headers = {"Authorization": f"Bearer {API_KEY}"}
        whole = [Stream(body).read(service.url, headers=headers).outcome for body in asked]
        assert all(reason == "length" for _, reason, _ in whole), whole
        service.says("standby", "wait here: ")
        streams, threads = together(service, asked, headers=headers)
        while not all(stream.heard_s for stream in streams):
            time.sleep(0.01)
        service.kill("coordinator")
        service.says("standby", "taking over in term 1")
        for thread in threads:
            thread.join()
        assert [stream.outcome for stream in streams] == whole
        service.begin("coordinator")
        service.says("coordinator", "from now on it is the standby of")
        service.says("coordinator", "is copied")
        assert [Stream(body).read(service.url, headers=headers).outcome for body in asked] == whole
