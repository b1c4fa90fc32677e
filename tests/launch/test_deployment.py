"""The files of `config export`: what systemd, compose and Kubernetes are told is what `serve` would
start, and they take it."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dovetail.launch import cli
from dovetail.launch.commands.config import GRAFANA
from dovetail.launch.files.deployment.containers import (
    READY,
    USER,
    DeployedProcess,
    compose_file,
    kubernetes_manifest,
)
from dovetail.launch.files.deployment.systemd import _bound, _quoted, _resources, systemd_units
from dovetail.launch.machine.fit import memory_limit, needs_of
from dovetail.launch.machine.topology import Place
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import KeysError, UserError
from dovetail.protocol.keys import generate_keys
from dovetail.runtime.http.exposition import Exposition
from dovetail.workers.models.checkpoints.footprint import PROCESS_BYTES
from support import deployed
from support.deployed import parsed, settings
from support.golden import representative

Run = Callable[..., "subprocess.CompletedProcess[str]"]
EXPOSURE = {"http": 1.5, "other": 0.5}
"""At most so much of 10 in `systemd-analyze security`: http has a network, workers run code."""
DOCKERFILE = Path(_quoted.__code__.co_filename).resolve().with_name("Dockerfile")
KEY = "a-key-of-at-least-16-characters"


def services(units: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in units.items() if name.endswith(".service")}


def values(unit: str, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit, re.MULTILINE)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    generate_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def api_keys(tmp_path: Path) -> Path:
    (file := tmp_path / "api keys").write_text(f"{KEY}\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in a folder whose name means something to everybody who might read it."""
    folder = tmp_path / "a model of 100% $HOME:latest"
    folder.symlink_to(DEMO_FOLDER / "target", target_is_directory=True)
    return folder


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_takes_the_units_and_finds_little_exposed(
    invoke: Run, tmp_path: Path, api_keys: Path, model: Path
) -> None:
    said = invoke(
        *("config", "export", "systemd", "--target", str(model), "--draft", "substitute"),
        *("--out", str(tmp_path / "units"), "--http.api_key_file", str(api_keys)),
    )
    assert said.returncode == 0, said.stderr
    files = [Path(line) for line in said.stdout.splitlines()]
    verified = subprocess.run(
        ["systemd-analyze", "verify", *map(str, files)], capture_output=True, text=True
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    for file in files:
        if file.suffix == ".service":
            most = EXPOSURE["http" if "http" in file.name else "other"]
            judged = subprocess.run(
                [
                    "systemd-analyze",
                    "security",
                    "--offline=true",
                    f"--threshold={most * 10:g}",
                    file,
                ],
                capture_output=True,
                text=True,
            )
            assert judged.returncode == 0, judged.stdout


def test_units_are_the_processes_of_serve_and_are_watched() -> None:
    units = systemd_units(settings(draft__kind="ngram", coordinator__stuck_s="20"))
    names = services(units)
    assert [*names] == [
        f"dovetail-{name}.service"
        for name in ("coordinator", "http", "worker-target", "worker-draft")
    ]
    assert values(units["dovetail.target"], "Wants") == [" ".join(names)]
    for name, unit in names.items():
        assert values(unit, "Type") == ["notify"]
        assert values(unit, "WatchdogSec") == ["60"]
        assert values(unit, "PartOf") == ["dovetail.target"]
        assert values(unit, "Restart") == ["always"]
        assert (values(unit, "RestartSec"), values(unit, "StartLimitIntervalSec")) == (["5"], ["0"])
        drained = ["3"] if "worker" in name else []
        assert values(unit, "RestartPreventExitStatus") == drained
        assert values(unit, "SuccessExitStatus") == drained
        assert not values(unit, "Wants"), "a coordinator that was stopped would be started again"
        assert ("dovetail-coordinator.service" in unit) == (name != "dovetail-coordinator.service")
        kept = [] if "http" in name else ["dovetail"]  # the coordinator, too, saves what it learns
        assert values(unit, "CacheDirectory") == kept
        assert ("XDG_CACHE_HOME=%C" in values(unit, "Environment")) == bool(kept)
        command = shlex.split(values(unit, "ExecStart")[0])
        assert Path(command[0]).is_absolute()
        given = parsed(command[command.index("-m") + 2 if "-m" in command else 1 :])
        if name != "dovetail-coordinator.service":
            assert given["connect"] == "ipc:///run/dovetail/coordinator"
    assert "--draft.kind=ngram" in names["dovetail-worker-draft.service"]
    hub = names["dovetail-coordinator.service"]
    assert "--coordinator.journal=/var/lib/dovetail/journal" in hub
    assert values(hub, "StateDirectory") == ["dovetail"]
    off = systemd_units(settings(draft__kind="ngram", coordinator__journal="off"))
    assert "--coordinator.journal=off" in off["dovetail-coordinator.service"]


def test_a_unit_has_the_cores_and_memory_nodes_of_its_process() -> None:
    def lines(place: Place) -> list[str]:
        return [*_resources(DeployedProcess("target", (), place, 5, False, ()))]

    one = lines(Place((8, 9, 10, 11), (1,)))
    assert {"AllowedCPUs=8-11", "AllowedMemoryNodes=1", "NUMAPolicy=bind", "NUMAMask=1"} < {*one}
    assert "MemoryMax=5" in one
    shards = lines(Place((0, 1, 8, 9), (0, 1), ((0, 1), (8, 9))))
    assert {"AllowedCPUs=0-1,8-9", "NUMAPolicy=bind", "NUMAMask=0-1"} < {*shards}
    assert "NUMAPolicy=interleave" in lines(Place((0, 8), (0, 1)))
    assert not [line for line in lines(Place((0,))) if "NUMA" in line]


def test_memory_is_what_a_model_takes_while_it_loads_and_more() -> None:
    for role in ("target", "draft"):
        (need,) = needs_of(settings().settings, (role,))
        limit = memory_limit(settings().settings, role)
        assert limit is not None
        assert limit > 1.1 * need.size
    assert memory_limit(settings(memory__ram="3GB").settings, "target") == round(
        1.1 * (3e9 + PROCESS_BYTES)
    )
    assert memory_limit(settings(target__device="cuda:0").settings, "target") is None
    assert (memory_limit(settings(draft__kind="ngram").settings, "draft") or 0) > 150e6


def test_a_gpu_is_left_to_the_process_that_may_use_it() -> None:
    units = systemd_units(settings(draft__device="cuda:0", draft__kind="small"))
    for name, unit in services(units).items():
        with_gpu = name == "dovetail-worker-draft.service"
        assert ("PrivateDevices=yes" in unit) != with_gpu
        assert ("DeviceAllow=char-nvidia rw" in unit) == with_gpu
        assert ("LimitMEMLOCK=infinity" in unit) == with_gpu


def test_keys_are_handed_over_as_credentials(keys: Path, api_keys: Path) -> None:
    units = systemd_units(
        settings(
            coordinator__listen="tcp://0.0.0.0:5555",
            coordinator__keys=str(keys),
            http__host="0.0.0.0",
            http__api_key_file=str(api_keys),
        )
    )
    hub = units["dovetail-coordinator.service"]
    assert f"coordinator.key:{keys}/coordinator.key" in values(hub, "LoadCredential")
    assert f"client.pub:{keys}/client.pub" in values(hub, "LoadCredential")
    server = units["dovetail-http.service"]
    assert values(server, "LoadCredential") == [
        f"api-keys:{api_keys}",
        f"client.key:{keys}/client.key",
        f"coordinator.pub:{keys}/coordinator.pub",
    ]
    assert "--http.api_key_file=/run/dovetail-http/api-keys" in server
    assert "--connect=tcp://127.0.0.1:5555" in server
    assert values(server, "ExecStartPre") == [
        "/usr/bin/install -m 0400 -t /run/dovetail-http %d/api-keys",
        "/usr/bin/install -D -m 0400 -t /run/dovetail-http/keys %d/client.key %d/coordinator.pub",
    ]
    draft = units["dovetail-worker-draft.service"]
    assert f"target.key:{keys}/target.key" not in values(draft, "LoadCredential")
    assert KEY not in "".join(units.values())
    (keys / "draft.key").unlink()
    with pytest.raises(KeysError, match=r"draft\.key"):
        systemd_units(settings(coordinator__listen="tcp://*:5555", coordinator__keys=str(keys)))


def test_words_of_a_command_mean_themselves() -> None:
    assert _quoted('--target.model=/a b/100%/$HOME"\\') == (
        '"--target.model=/a b/100%%/$$HOME\\"\\\\"'
    )
    assert _quoted("--cores=0-3,8") == "--cores=0-3,8"
    assert _quoted("--http.model=a\nExecStartPre=b") == '"--http.model=a\\nExecStartPre=b"'


def test_a_path_means_itself_in_a_list_of_paths() -> None:
    assert _bound(Path("/home/$a/b:c%")) == '"/home/$a/b\\:c%%"'
    assert _bound(Path("/home/a-b")) == "/home/a-b"
    with pytest.raises(UserError, match="line break"):
        _bound(Path("/home/a\nUser=root"))


@pytest.mark.parametrize("what", ["systemd", "compose", "kubernetes"])
def test_what_a_service_could_not_use_is_a_mistake(invoke: Run, what: str) -> None:
    wrong = [("http.port", "0"), ("coordinator.journal", "/else"), ("coordinator.record", "/else")]
    wrong.append(("coordinator.keys", "/a\nb"))
    for name, value in (*wrong, *[("coordinator.listen", "ipc:///else")] * (what != "kubernetes")):
        said = invoke("config", "export", what, f"--{name}", value)
        assert (said.returncode, f"{name} = " in said.stderr) == (2, True), said.stderr
    model = invoke("config", "export", what, "--target", "nobody/has-this", "--draft", "none")
    assert (model.returncode, "hf download nobody/has-this" in model.stderr) == (2, True)
    assert "Traceback" not in said.stderr + model.stderr


def test_a_port_that_is_roots_is_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (least := tmp_path / "least").write_text("1024\n")
    monkeypatch.setattr(f"{systemd_units.__module__}.UNPRIVILEGED", least)
    with pytest.raises(UserError, match=r"http\.port = 80: .* below 1024"):
        systemd_units(settings(http__port="80"))


def test_a_model_that_the_units_user_cannot_read_is_a_mistake(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    shutil.copytree(DEMO_FOLDER / "target", folder)
    model = settings(target__model=str(folder))
    assert systemd_units(model)
    for path, mode, remedy in (
        (folder / "model.safetensors", 0o600, "o+r"),
        (folder, 0o700, "o+rx"),
    ):
        before = path.stat().st_mode
        path.chmod(mode)
        named = re.escape(f"{path} has mode {mode:04o}, ") + ".*"
        with pytest.raises(UserError, match=named + re.escape(f"`chmod {remedy} '{path}'`")):
            systemd_units(model)
        path.chmod(before)


def test_a_server_that_is_open_to_others_needs_a_key(invoke: Run) -> None:
    said = invoke("config", "export", "systemd", "--http.host", "0.0.0.0")
    assert (said.returncode, "--http.api_key_file" in said.stderr) == (2, True)


def test_a_compose_file_is_of_the_specifications_shape(model: Path) -> None:
    text = compose_file(settings(target__model=str(model), draft__kind="ngram", http__port="8123"))
    content = yaml.safe_load(text)
    jsonschema.validate(content, deployed.COMPOSE)
    assert [*content["services"]] == ["coordinator", "http", "target", "draft"]
    for name, service in content["services"].items():
        parsed([word.replace("$$", "$") for word in service["command"]])
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["restart"] == "unless-stopped"
        assert (service.get("network_mode") == "none") == (name != "http")
    target = content["services"]["target"]
    assert f"--target.model=/models/{model.name}".replace("$", "$$") in target["command"]
    (bound,) = (one for one in target["volumes"] if isinstance(one, dict))
    assert bound["source"] == str(model).replace("$", "$$")
    assert bound["target"] == f"/models/{model.name}".replace("$", "$$")
    assert bound["read_only"]
    server = content["services"]["http"]
    assert server["ports"] == ["127.0.0.1:8123:8123"]
    assert "--http.host=0.0.0.0" in server["command"]
    assert content["secrets"] == {"api-keys": {"file": "./api-keys"}}
    hub = content["services"]["coordinator"]
    assert "--coordinator.journal=/cache/journal" in hub["command"]
    assert "cache:/cache" in hub["volumes"]


def test_the_commands_of_a_comment_take_any_path() -> None:
    """A folder whose name has two words is one word of a command that is copied from the file."""
    text = compose_file(settings(http__api_key_file="/some keys"))
    assert "sudo chown 10001 '/some keys'" in text


@pytest.mark.parametrize("listen", ["tcp://*:5555", "ipc:///some/hub"])
def test_containers_that_would_not_listen_where_they_are_told_to_are_a_mistake(
    keys: Path, listen: str
) -> None:
    flags = {"coordinator__listen": listen, "coordinator__keys": str(keys)}
    for export in (compose_file, kubernetes_manifest):
        with pytest.raises(UserError, match=f"'{re.escape(listen)}': .*; leave it out"):
            export(settings(**flags))
    there = {**flags, "coordinator__listen": "tcp://0.0.0.0:5555"}
    assert "--coordinator.listen=tcp://0.0.0.0:5555" in kubernetes_manifest(settings(**there))


@pytest.mark.parametrize(
    ("draft", "leader", "follower"),
    [
        ("ngram", ["coordinator", "http", "target"], ["draft"]),
        ("none", ["coordinator", "http"], ["target"]),
    ],
)
def test_a_manifest_is_a_group_of_a_leader_and_a_worker(
    draft: str, leader: list[str], follower: list[str], model: Path, tmp_path: Path
) -> None:
    text = kubernetes_manifest(settings(target__model=str(model), draft__kind=draft))
    group, service = yaml.safe_load_all(text)
    jsonschema.validate(group, deployed.LEADER_WORKER_SET)
    jsonschema.validate(service, deployed.SERVICE)
    template = group["spec"]["leaderWorkerTemplate"]
    pods = [template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]]
    assert [[c["name"] for c in pod["containers"]] for pod in pods] == [leader, follower]
    for pod in pods:
        assert pod["securityContext"]["runAsUser"] == USER
        for container in pod["containers"]:
            assert container["resources"]["requests"] == container["resources"]["limits"]
            given = parsed(container["args"])
            if container["name"] != "coordinator":
                assert given["connect"] == "tcp://$(LWS_LEADER_ADDRESS):5555"
            assert "--cores" not in " ".join(container["args"])
        secrets = {v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
        assert secrets == {f"dovetail-{c['name']}-keys" for c in pod["containers"]}
        assert all(f"create secret generic {name} " in text for name in secrets)
    hub, server, *_ = pods[0]["containers"]
    assert "--coordinator.journal=/cache/journal" in hub["args"]
    assert {"name": "cache", "mountPath": "/cache"} in hub["volumeMounts"]
    assert server["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert server["livenessProbe"]["httpGet"]["path"] == "/health"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert server[probe]["timeoutSeconds"] == 5
        assert server[probe]["failureThreshold"] >= 3
    deployed.check_built(text, tmp_path)


def test_the_image_has_two_stages_and_runs_as_nobody_in_particular() -> None:
    steps = deployed.instructions(DOCKERFILE)
    names = [name for name, _ in steps]
    assert names.count("FROM") == 2
    last = dict(steps[len(names) - names[::-1].index("FROM") :])
    assert last["USER"] == f"{USER}:{USER}"
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(last["ENTRYPOINT"]) == ["dovetail"]
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    assert check == ["python", "-c", READY.format(port=8000)]
    copied = [text for name, text in steps if name in ("COPY", "ADD")]
    assert copied == [". /src", "--from=build /opt/dovetail /opt/dovetail"]
    left_out = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().split()
    assert {"keys", "**/api-keys", "**/*.key"} <= {*left_out}


METRIC = re.compile(r"\b(?:dovetail_|vllm:)\w+")


def exposed() -> set[str]:
    """Every name that /metrics has once a request was answered."""
    exposition = Exposition()
    watch = exposition.watch("demo", 0.0)
    watch.tokens(1)
    watch.tokens(1)
    watch.ended()
    page = exposition.text(
        representative()["reported"], "demo", answering=1, connections=1, let_go=1
    ).decode()
    return {
        sample.name for family in text_string_to_metric_families(page) for sample in family.samples
    }


def test_every_metric_of_the_dashboard_is_one_that_is_exposed() -> None:
    board = json.loads(GRAFANA.read_text(encoding="utf-8"))
    named = {
        metric
        for panel in board["panels"]
        for target in panel["targets"]
        for metric in METRIC.findall(target["expr"])
    }
    assert len(named) > 20
    assert named <= exposed()


def test_panels_lie_side_by_side_and_have_numbers_of_their_own() -> None:
    panels = json.loads(GRAFANA.read_text(encoding="utf-8"))["panels"]
    places = [[panel["gridPos"][axis] for axis in "xywh"] for panel in panels]
    cells = [
        (column, row)
        for x, y, w, h in places
        for column in range(x, x + w)
        for row in range(y, y + h)
    ]
    assert len(cells) == len({*cells})
    assert max(column for column, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_dashboard_is_printed_for_grafana_to_import(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "export", "grafana"]) == 0
    assert json.loads(capsys.readouterr().out)["uid"] == "dovetail"
