"""Flag over environment over file over default, and every value with its origin."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.launch.cli import run
from dovetail.launch.commands.config import show
from dovetail.launch.settings.catalog import SETTINGS
from dovetail.launch.settings.configure import SWITCHES, configure, read_file
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.settings import Settings


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[tree]\ngamma = 3\ndepth = 3\nwidth = 3\n[target]\nmodel = 'm'\n")
    environment = {"DOVETAIL_TREE__GAMMA": "4", "DOVETAIL_TREE__DEPTH": "4"}
    found = configure(flags={"tree.gamma": "5"}, file=file, environment=environment)
    tree = found.settings.tree
    assert (tree.gamma, tree.depth, tree.width, tree.policy) == (5, 4, 3, "goodput")
    origins = [found.origins[f"tree.{key}"] for key in ("gamma", "depth", "width", "policy")]
    assert origins == ["--tree.gamma", "DOVETAIL_TREE__DEPTH", str(file), "default"]


def test_a_setting_of_a_table_within_a_table_has_a_flag_a_variable_and_a_file_too(
    tmp_path: Path,
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[target]\nmodel = "m"\n[target.split]\ndevice = "cpu"\nlayers = 3\n')
    found = configure(file=file, environment={"DOVETAIL_TARGET__SPLIT__LAYERS": "4"})
    assert (found.settings.target.split.device, found.settings.target.split.layers) == ("cpu", 4)
    assert [found.origins[f"target.split.{key}"] for key in ("device", "layers")] == [
        str(file),
        "DOVETAIL_TARGET__SPLIT__LAYERS",
    ]
    assert (
        configure(flags={"target.split.layers": "5"}, file=file, environment={}).value(
            "target.split.layers"
        )
        == 5
    )
    assert found.arguments("target", "memory") == [
        "--target.model=m",
        "--target.split.device=cpu",
        "--target.split.layers=4",
    ]


def test_without_anything_the_settings_are_the_defaults_where_a_target_is_named() -> None:
    settings = configure(flags={"target.model": "m"}, environment={}).settings
    assert settings == Settings().model_copy(
        update={"target": Settings().target.model_copy(update={"model": "m"})}
    )


def test_the_settings_of_the_demo_are_not_for_the_workers_of_somebody_else() -> None:
    assert configure(environment={}, demo=False).settings == Settings()
    assert configure(environment={}).settings != Settings()


def test_the_demo_has_settings_of_its_own_below_the_users(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[tree]\ngamma = 3\n")
    found = configure(file=file, environment={})
    assert found.settings.tree.gamma == 3
    assert found.origins["tree.depth"] == "demo"
    assert "demo" not in configure(flags={"target.model": "m"}, environment={}).origins.values()


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        ({"tree.gama": "6"}, {}, ("tree.gama", "did you mean 'tree.gamma'")),
        (
            {"tree.gamma": "six"},
            {},
            ("tree.gamma = 'six'", "--tree.gamma", "whole number from 0 to 1023"),
        ),
        ({"tree.gamma": "9999"}, {}, ("9999", "1023")),
        ({"sampling.top_p": "0"}, {}, ("a number above 0 and at most 1",)),
        ({"target.threads": "few"}, {}, ("whole number from 1 to 1024 or 'auto'",)),
        (
            {"draft.kind": "substitut"},
            {},
            ("draft.kind", "there is no draft kind 'substitut'", "'substitute'"),
        ),
        ({"draft.kind": "smal"}, {}, ("there is no draft kind 'smal'",)),
        (
            {"sampling.logit_bias": "5"},
            {},
            ("sampling.logit_bias = '5'", "--sampling.logit_bias", "17=-100,5=2.5"),
        ),
        ({"sampling.logit_bias": "5=1,5=2"}, {}, ("token 5 has two biases",)),
        ({"sampling.logit_bias": "5=101"}, {}, ("'5=101'", "B a number from -100 to 100")),
        ({"sampling.presence_penalty": "3"}, {}, ("a number from -2 to 2",)),
        (
            {"tree.thresholds": "1,2,3,4,5,6,7,8"},
            {},
            (
                "tree.thresholds",
                "write text or one or more with commas between them",
                ", at most 7 of them",
            ),
        ),
        (
            {"target.split.device": "gpu"},
            {},
            ("target.split.device = 'gpu'", "write cuda:N", ", or leave it empty"),
        ),
        (
            {"target.split.layers": "0"},
            {},
            ("target.split.layers = '0'", "a whole number from 1 to 65536 or 'auto'"),
        ),
        (
            {"target.split.layer": "3"},
            {},
            ("target.split.layer", "did you mean 'target.split.layers'"),
        ),
        ({"target.resident": "-1"}, {}, ("target.resident = '-1'", "a whole number from 0")),
        (
            {"coordinator.journal": "true"},
            {},
            ("coordinator.journal = 'true' (--coordinator.journal) looks like a switch",),
        ),
        ({}, {"DOVETAIL_COORDINATOR__RECORD": "no"}, ("coordinator.record", "write ./no for")),
        (
            {"target.prefill": "gpu"},
            {},
            ("target.prefill = 'gpu'", "write auto, local, cuda:N", "mps (Apple)"),
        ),
        (
            {"draft.device": "openvino:GPU"},
            {},
            ("draft.device = 'openvino:GPU'", "write auto, cuda:N", "mps (Apple) or cpu"),
        ),
        (
            {"coordinator.key_queue": "300"},
            {},
            (
                "coordinator.key_queue = 300 (--coordinator.key_queue)",
                "coordinator.queue = 256 (default)",
            ),
        ),
        (
            {"coordinator.queue": "8"},
            {"DOVETAIL_COORDINATOR__KEY_QUEUE": "9"},
            (
                "coordinator.key_queue = 9 (DOVETAIL_COORDINATOR__KEY_QUEUE)",
                "coordinator.queue = 8 (--coordinator.queue)",
                "is more than coordinator.queue = 8",
            ),
        ),
        ({"memory.vram": "much"}, {}, ("memory.vram = 'much'", "such as 512MiB or 7GB")),
        (
            {},
            {"DOVETAIL_TARGET__SPLIT__LAYER": "6"},
            ("did you mean 'DOVETAIL_TARGET__SPLIT__LAYERS'",),
        ),
        (
            {},
            {"DOVETAIL_TREE__GAMA": "6"},
            ("DOVETAIL_TREE__GAMA", "did you mean 'DOVETAIL_TREE__GAMMA'"),
        ),
        ({}, {"DOVETAIL_TREE_GAMMA": "6"}, ("did you mean DOVETAIL_TREE__GAMMA",)),
        ({}, {"DOVETAIL_TREE__GAMMA": "-1"}, ("'-1'", "DOVETAIL_TREE__GAMMA")),
    ],
)
def test_a_wrong_setting_is_named_with_value_origin_and_remedy(
    flags: dict[str, str], environment: dict[str, str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as caught:
        configure(flags=flags, environment=environment)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tree]\ngama = 6\n", ("tree.gama", "did you mean 'tree.gamma'")),
        ("[tre]\ngamma = 6\n", ("tre ", "did you mean 'tree'")),
        ("gamma = 6\n", ("gamma ", "not a section")),
        ("tree = 3\n", ("tree in ", "must be a table: [tree]", 'policy = "goodput"')),
        ("[[tree]]\ngamma = 6\n", ("tree in ", "must be a table")),
        ("[tree]\ngamma = '6'\n", ("tree.gamma = '6'", "whole number")),
        ("[tree\n", ("is not TOML",)),
        (
            "[target]\nsplit = 3\n",
            ("there is no setting 'target.split'", "did you mean 'target.split."),
        ),
        ("[target.split]\nlayers = 'few'\n", ("target.split.layers = 'few'", "whole number")),
        (
            "[target.spli]\nlayers = 3\n",
            ("target.spli.layers", "did you mean 'target.split.layers'"),
        ),
        (
            "[sampling]\nlogit_bias = 3\n",
            ("sampling.logit_bias = 3", "A=B with commas between them"),
        ),
        (
            "[sampling.logit_bias]\nfive = 3\n",
            ("sampling.logit_bias = {'five': 3}", "{ 17 = -100, 5 = 2.5 }"),
        ),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        configure(file=file, environment={})
    assert all(word in str(caught.value) for word in (*words, str(file))), caught.value


def test_a_shorter_queue_shortens_the_queue_of_a_key_that_nobody_has_set(tmp_path: Path) -> None:
    found = configure(flags={"coordinator.queue": "9"}, environment={})
    assert (found.settings.coordinator.queue, found.settings.coordinator.key_queue) == (9, 9)
    file = tmp_path / "settings.toml"
    file.write_text("[coordinator]\nqueue = 9\nkey_queue = 9\n")
    assert configure(file=file, environment={}).settings == found.settings


def test_variables_that_kubernetes_makes_for_a_service_are_not_ours() -> None:
    port = "DOVETAIL_COORDINATOR_PORT_5555_TCP_ADDR"
    service = {"DOVETAIL_SERVICE_HOST": "10.0.0.1", port: "10.0.0.2"}
    assert configure(environment=service).settings == configure(environment={}).settings


@given(
    gamma=st.integers(0, 1023),
    temperature=st.floats(0, 100),
    model=st.text(st.characters(blacklist_categories=["Cs", "Cc"])).filter(
        lambda text: text.lower() not in SWITCHES
    ),
    biases=st.dictionaries(st.integers(0, 1 << 30), st.floats(-100, 100), max_size=3),
)
def test_the_flags_for_another_process_give_it_the_same_settings(
    gamma: int, temperature: float, model: str, biases: dict[int, float]
) -> None:
    spelt = ",".join(f"{token}={bias!r}" for token, bias in biases.items())
    flags = {
        "tree.gamma": str(gamma),
        "sampling.temperature": str(temperature),
        "target.model": model,
        "sampling.logit_bias": spelt,
    }
    mine = configure(flags=flags, environment={})
    assert dict(mine.settings.sampling.logit_bias) == biases
    flags = dict(
        argument.removeprefix("--").split("=", 1)
        for argument in mine.arguments("target", "draft", "tree", "sampling", "coordinator")
    )
    assert configure(flags=flags, environment={}).settings == mine.settings


def test_config_show_prints_a_file_that_gives_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    biases = ("--logit-bias", "9=-2.5", "--logit-bias", "5=3")
    assert (
        run(
            [*shlex.split("config show --origin --gamma 9 --draft none --temperature 0.5"), *biases]
        )
        == 0
    )
    text = capsys.readouterr().out
    file = tmp_path / "settings.toml"
    file.write_text(text)
    values = read_file(file)
    assert set(values) == set(SETTINGS)
    assert (values["tree.gamma"], values["draft.kind"], values["sampling.temperature"]) == (
        9,
        "none",
        0.5,
    )
    assert "gamma = 9                        # --tree.gamma" in text
    again = configure(file=file, environment={}).settings
    assert again.sampling.logit_bias == ((5, 3.0), (9, -2.5))
    assert again.model_dump(mode="json") == tomllib.loads(text)


def test_config_show_as_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["config", "show", "--json", "--origin", "--draft", "some/folder", "--target", "t"])
        == 0
    )
    shown = json.loads(capsys.readouterr().out)
    assert shown["draft"] == {
        "kind": "auto",
        "model": "some/folder",
        "weights": "auto",
        "device": "auto",
        "isa": "auto",
        "contrast": "auto",
        "ahead": "auto",
        "share": "auto",
        "pickled": False,
        "proof": "auto",
        "head_rows": "auto",
        "merge_lookup": True,
    }
    assert shown["origin"]["draft.model"] == "--draft.model"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--draft", "ngram", "--draft.kind", "small"), "--draft ngram and --draft.kind small"),
        (("--draft", "a", "--draft.model", "b"), "--draft a and --draft.model b"),
    ],
)
def test_two_names_for_the_draft_are_refused(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        show.main(list(flags), standalone_mode=False)
