"""The settings: defaults that hold, and refusals that name what they refuse."""

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dovetail.protocol import settings
from dovetail.protocol.settings import (
    DraftSettings,
    Sampling,
    Settings,
    TargetSettings,
    TreeSettings,
    byte_count,
    misfit,
)


def test_the_defaults_are_valid_settings() -> None:
    assert Settings.model_validate(Settings().model_dump()) == Settings()


@pytest.mark.parametrize(
    "content", [{"targett": {}}, {"tree": {"gama": 3}}, {"sampling": {"temprature": 1.0}}]
)
def test_an_unknown_key_is_an_error(content: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Settings.model_validate(content)


def test_a_misspelt_policy_is_refused() -> None:
    with pytest.raises(
        ValidationError, match="there is no tree policy 'dynamc'; choose 'static' or 'dynamic'"
    ):
        TreeSettings(policy="dynamc")


@pytest.mark.parametrize(
    ("model", "field", "value", "complaint"),
    [
        (DraftSettings, "kind", "eagle4", "there is no draft kind 'eagle4'"),
        (DraftSettings, "weights", "int5", "there is no type of draft weights 'int5'"),
        (TargetSettings, "weights", "int7", "there is no type of target weights 'int7'"),
        (TargetSettings, "numa", "everywhere", "write auto, off, shard, a memory node such as 0"),
        (TargetSettings, "numa", -1, "greater than or equal to 0"),
        (TargetSettings, "weights", "fp31", "there is no type of target weights 'fp31'"),
        (TargetSettings, "threads", 0, "greater than or equal to 1"),
        (TargetSettings, "threads", "many", "auto"),
        (TreeSettings, "gamma", -1, "greater than or equal to 0"),
        (TreeSettings, "gamma", settings.MAX_GAMMA + 1, "less than or equal to 1023"),
        (TreeSettings, "depth", 0, "greater than or equal to 1"),
        (TreeSettings, "sharpening", 0.0, "greater than 0"),
        (Sampling, "temperature", -0.1, "greater than or equal to 0"),
        (Sampling, "temperature", float("nan"), "finite"),
        (Sampling, "temperature", "1", "valid number"),
        (Sampling, "top_k", True, "valid integer"),
        (Sampling, "top_p", 0.0, "greater than 0"),
        (Sampling, "min_p", 1.1, "less than or equal to 1"),
        (Sampling, "repetition_penalty", 0.0, "greater than or equal to 0.01"),
        (Sampling, "repetition_penalty", 1e-40, "greater than or equal to 0.01"),
        (Sampling, "presence_penalty", 2.1, "less than or equal to 2"),
        (Sampling, "frequency_penalty", -2.1, "greater than or equal to -2"),
        (Sampling, "min_tokens", -1, "greater than or equal to 0"),
        (Sampling, "acceptance", "typical", "'coupled' or 'rejection'"),
        (Sampling, "logit_bias", ((5, 100.5),), "less than or equal to 100"),
        (Sampling, "logit_bias", ((-1, 1.0),), "greater than or equal to 0"),
        (Sampling, "logit_bias", ((5, 1.0), (5, 2.0)), "token 5 has two biases"),
        (Sampling, "logit_bias", ((5, "1"),), "valid number"),
        (Sampling, "logit_bias", {"5": True}, "valid number"),
        (
            Sampling,
            "logit_bias",
            {"five": 1.0},
            "write token ids and biases, such as 17=-100,5=2.5",
        ),
        (Sampling, "logit_bias", "5:1", "write token ids and biases"),
        (
            Sampling,
            "logit_bias",
            {str(i): 1.0 for i in range(settings.MAX_BIASES + 1)},
            f"at most {settings.MAX_BIASES} items",
        ),
    ],
)
def test_a_value_out_of_range_or_of_another_type_is_refused(
    model: type[settings.Frozen], field: str, value: object, complaint: str
) -> None:
    with pytest.raises(ValidationError, match=complaint):
        model.model_validate({field: value})


@pytest.mark.parametrize(
    "value",
    [
        ((5, -2.5), (17, 3.0)),
        ((17, 3.0), (5, -2.5)),
        {"17": 3, "5": -2.5},
        {17: 3.0, 5: -2.5},
        "17=3, 5=-2.5",
    ],
)
def test_biases_are_equal_however_they_are_written(value: object) -> None:
    sampling = Sampling.model_validate({"logit_bias": value})
    assert sampling == Sampling(logit_bias=((5, -2.5), (17, 3.0)))
    assert len({sampling, Sampling(logit_bias=((5, -2.5), (17, 3.0)))}) == 1
    assert sampling.model_dump(mode="json")["logit_bias"] == {"5": -2.5, "17": 3.0}


@pytest.mark.parametrize(
    ("acceptance", "policy", "kind", "complaint"),
    [
        ("coupled", "dynamic", "auto", None),
        ("coupled", "static", "eagle", None),
        ("coupled", "budget", "ngram", None),
        ("rejection", "static", "small", None),
        ("rejection", "dynamic", "small", "set tree.policy to 'static', not 'dynamic'"),
        ("rejection", "beam", "none", "set tree.policy to 'static', not 'beam'"),
        ("rejection", "static", "ngram", "choose another draft.kind than 'ngram', or 'coupled'"),
        (
            "coupled",
            "static",
            "ngram",
            "set tree.policy to 'dynamic' or 'budget' or 'goodput', not 'static'",
        ),
        (
            "coupled",
            "beam",
            "ngram",
            "set tree.policy to 'dynamic' or 'budget' or 'goodput', not 'beam'",
        ),
    ],
)
def test_what_does_not_go_together_is_said_in_one_line(
    acceptance: Literal["coupled", "rejection"], policy: str, kind: str, complaint: str | None
) -> None:
    for temperature in (0.0, 1.0):
        text = misfit(
            Sampling(acceptance=acceptance, temperature=temperature),
            TreeSettings(policy=policy),
            kind,
        )
        assert (text is None) == (complaint is None)
        assert complaint is None or (complaint in str(text) and "\n" not in str(text))


def test_at_temperature_0_nothing_is_rejected_at_random() -> None:
    assert not Sampling(acceptance="rejection").rejects
    assert Sampling(acceptance="rejection", temperature=0.1).rejects
    assert not Sampling(temperature=0.1).rejects


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().tree.gamma = 3  # type: ignore[misc]


def test_every_setting_says_what_it_is() -> None:
    for section in Settings.model_fields.values():
        assert isinstance(section.annotation, type)
        assert issubclass(section.annotation, settings.Frozen)
        for name, field in section.annotation.model_fields.items():
            assert field.description, name


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("0MiB", 0),
        ("12B", 12),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("512MiB", 512 << 20),
        ("7GB", 7 * 10**9),
        ("7GiB", 7 << 30),
        ("1.5 GiB", 3 << 29),
        ("2TiB ", 2 << 40),
    ],
)
def test_a_size_is_read_in_powers_of_ten_or_two(text: str, size: int) -> None:
    assert byte_count(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8",
        "512",
        "1e3",
        "0.5",
        " 12 ",
        "MiB",
        "1 mb",
        "1XB",
        "1iB",
        "-5GB",
        "infGB",
        "nanB",
        "1e999TB",
        "five",
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: write a number and a unit"):
        byte_count(text)


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    complaint = "is not a size"
    try:
        size = byte_count(text)
    except ValueError as error:
        size, complaint = 0, str(error)
    assert size >= 0
    assert "is not a size" in complaint
