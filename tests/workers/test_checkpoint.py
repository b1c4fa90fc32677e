"""A folder that would load into something wrong is refused, with the file and the tensor named."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils.chat_template_utils import render_jinja_template

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.vocabulary import read_vocabulary
from dovetail.runtime.text.templates import RENDERER
from dovetail.runtime.text.tokenizer import why_no_chats
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.tokenizer import _special_tokens, read_tokenizer
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from hostile.checkpoints import BAD, Bad
from support.models import VOCABULARY, reference_logits
from support.sentences import check_sentence


@pytest.fixture
def folder(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama to be damaged."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the weight file by name ("__" for "."); None takes one away."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(source: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_language_model(str(source), weights="fp32", device="cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


OF_A_WORKER = ("unknown kind", "normalizer", "payload for weights")  # what else a worker looks at
LARGE = ("GiB", "MiB", "/dev/zero")
REMEDILESS = ("a NaN", "an infinite", "tokenizer.json", "a token of id")  # nothing to do about it


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(bad, id=bad.name)
        for kind in ("weights", "configuration", "tokenizer", "chat template")
        for bad in BAD[kind]
        if not any(part in bad.name for part in OF_A_WORKER + LARGE)
    ],
)
def test_a_bad_folder_is_refused_in_one_line_by_name(folder: Path, bad: Bad) -> None:
    """`test_hostile.py` loads these and larger ones in workers."""
    bad.spoil(folder)
    said = refusal(folder)
    assert all(word in said for word in bad.words), said
    if not bad.name.startswith(REMEDILESS):
        check_sentence(said, str(folder))


def test_a_whole_folder_opens_with_its_facts(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tokenizer == (folder / "tokenizer.json").read_bytes()
    assert (checkpoint.vocabulary.size, checkpoint.vocabulary.end, checkpoint.vocabulary.begin) == (
        VOCABULARY,
        (1,),
        0,
    )


def test_the_digest_covers_weights_and_configuration_but_not_the_place(
    folder: Path, llama_folder: Path
) -> None:
    before = open_checkpoint(str(llama_folder)).digest
    assert open_checkpoint(str(folder)).digest == before
    edit_json(folder / "config.json", rms_norm_eps=1e-4)
    changed = open_checkpoint(str(folder)).digest
    assert changed != before
    edit_tensors(folder, lm_head__weight=torch.zeros(VOCABULARY, 64))
    assert open_checkpoint(str(folder)).digest not in (before, changed)


def test_a_digest_that_is_found_beside_other_work_is_the_same_and_names_what_is_wrong(
    folder: Path, llama_folder: Path
) -> None:
    known = open_checkpoint(str(llama_folder)).digest
    edit_json(folder / "config.json", rms_norm_eps=1e-4)
    changed = open_checkpoint(str(folder), wait=False)
    assert changed.digest == open_checkpoint(str(folder)).digest != known
    edit_tensors(folder, model__norm__weight=torch.full((64,), float("nan")))
    damaged = open_checkpoint(str(folder), wait=False)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds NaN"):
        print(damaged.digest)


def test_a_superfluous_tensor_is_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_tensors(folder, model__surplus=torch.ones(3))
    load_language_model(str(folder), weights="fp32", device="cpu")
    assert "model.surplus" in caplog.text


def test_layers_of_which_transformers_makes_a_list_are_refused_before_it_does(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="qwen2", num_hidden_layers=10**7)
    assert "num_hidden_layers is 10000000, and no model has more than" in refusal(folder)


def test_more_experts_than_any_model_has_are_refused_before_their_names_are_made(
    folder: Path,
) -> None:
    edit_json(folder / "config.json", model_type="mixtral", num_local_experts=3 * 10**9)
    assert "num_local_experts is 3000000000, and no model has more than" in refusal(folder)


def test_the_rotation_that_transformers_does_not_read_is_named_and_no_other_field(
    folder: Path,
) -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    edit_json(
        folder / "config.json",
        model_type="phi3",
        rope_parameters=None,
        rope_scaling=scaling,
        original_max_position_embeddings=48,
        pad_token_id=None,
    )
    assert "model type phi3: rope_scaling is {'type': 'su'" in refusal(folder)


def test_pickled_weights_are_refused_with_the_remedy(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    said = refusal(folder)
    assert "has only pickled weights" in said
    assert "convert them to safetensors" in said


def test_a_pipe_in_the_place_of_a_configuration_is_refused_and_not_waited_for(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "config.json cannot be read (it is not a file)" in refusal(folder)


def write_index(folder: Path, files: dict[str, str]) -> None:
    """Make the weight file the first of several; `files` names those in which certain tensors are
    said to be."""
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(
            {
                "metadata": {},
                "weight_map": {name: files.get(name, "model-1.safetensors") for name in names},
            }
        )
    )


@pytest.mark.parametrize("name", ["sub/model.safetensors", ".."])
def test_an_index_cannot_point_elsewhere(folder: Path, name: str) -> None:
    write_index(folder, {"model.norm.weight": name})
    assert "not a safetensors file beside it" in refusal(folder)


def test_an_index_must_be_true(folder: Path) -> None:
    write_index(folder, {"model.norm.weight": "model-2.safetensors"})
    save_file({"other": torch.ones(1)}, folder / "model-2.safetensors")
    assert "lacks tensor model.norm.weight" in refusal(folder)


def test_sharded_weights_load(folder: Path, llama_folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    write_index(folder, {"model.norm.weight": "model-2.safetensors"})
    save_file(
        {"model.norm.weight": tensors.pop("model.norm.weight")},
        folder / "model-2.safetensors",
        metadata={"format": "pt"},
    )
    save_file(tensors, folder / "model-1.safetensors", metadata={"format": "pt"})
    sharded, whole = (
        load_language_model(str(f), weights="fp32", device="cpu") for f in (folder, llama_folder)
    )
    logits = [
        m.forward(torch.tensor([3]), torch.tensor([0]), [Segment(m.new_cache(1), 0, 1)])
        for m in (sharded, whole)
    ]
    assert torch.equal(*logits)


def test_the_file_that_is_checked_is_the_one_that_is_loaded(folder: Path) -> None:
    """If model.safetensors lies beside an index, transformers loads the former."""
    tensors = load_file(folder / "model.safetensors")
    write_index(folder, {})
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": 0}, "size"),
        ({"eos_token_id": "one"}, "eos_token_id is 'one'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"hidden_size": 63}, "63"),
        ({"head_dim": -3}, "head_dim is -3"),
        ({"rope_parameters": 3}, "rope_parameters is 3"),
        ({"pad_token_id": 5000}, "config.json: pad_token_id is 5000; correct it"),
    ],
)
def test_what_cannot_be_decoded_is_refused_by_name(
    folder: Path, changes: dict[str, object], named: str
) -> None:
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", **changes)
    assert named in refusal(folder)


def test_angles_that_grow_beyond_the_context_are_those_of_transformers_within_it(
    folder: Path,
) -> None:
    edit_json(
        folder / "config.json",
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    )
    model = load_language_model(str(folder), weights="fp32", device="cpu")
    tokens = [3 + place % 40 for place in range(model.context)]
    found = model.forward(
        torch.tensor(tokens),
        torch.arange(len(tokens)),
        [Segment(model.new_cache(len(tokens)), 0, len(tokens))],
    )
    torch.testing.assert_close(found, reference_logits(folder, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", ["", "/no/such/folder", "./no-such-folder", "a/b/c/d", "../x"])
def test_what_is_neither_folder_nor_hub_id_is_refused(source: str) -> None:
    with pytest.raises(CheckpointError):
        find_folder(source)


def test_a_file_is_no_folder(folder: Path) -> None:
    assert "is a file" in refusal(folder / "config.json")


def test_a_model_that_is_not_in_the_cache_is_refused_with_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="hf download some-one/model --revision abc"):
        find_folder("some-one/model@abc")


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ("some-one/m-GGUF/m.Q4_K_M.gguf", "hf download some-one/m-GGUF m.Q4_K_M.gguf"),
        ("a/b/c/d.gguf@v2", "hf download a/b c/d.gguf --revision v2"),
        (
            "a/b/d-00001-of-00002.gguf",
            "hf download a/b d-00001-of-00002.gguf d-00002-of-00002.gguf",
        ),
    ],
)
def test_a_gguf_file_on_the_hub_is_named_with_its_model(
    source: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=f"run `{re.escape(command)}`"):
        find_folder(source)


def test_a_misspelt_path_is_answered_with_the_gguf_files_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    Path("pip/models").mkdir(parents=True)
    for name in ("b.gguf", "a.gguf", "notes.txt"):
        (Path("pip/models") / name).touch()
    for source in ("pip/models/misspelt.gguf", str(tmp_path / "pip/models/misspelt")):
        with pytest.raises(CheckpointError, match=r"not there \(its folder has a.gguf, b.gguf\)"):
            find_folder(source)


def test_a_misspelt_path_of_a_gguf_file_is_no_id_of_the_hub() -> None:
    for source in ("models/misspelt.gguf", "misspelt.gguf"):
        with pytest.raises(CheckpointError, match=f"{re.escape(source)} is not there: name an"):
            find_folder(source)


def test_special_tokens_may_be_lists_and_generation_config_has_the_last_word(folder: Path) -> None:
    edit_json(folder / "config.json", eos_token_id=[5, 6], bos_token_id=None)
    edit_json(folder / "generation_config.json", eos_token_id=[1, 7], bos_token_id=None)
    facts = read_tokenizer(folder)[1]
    assert (facts.end, facts.begin) == ((1, 7), None)
    (folder / "generation_config.json").unlink()
    assert read_tokenizer(folder)[1].end == (5, 6)


SPECIAL = {
    "special": True,
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
}
"""A special token of tokenizer.json, without id and text."""


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_tokenizers_own_end_token_ends_replies_beside_the_models(
    folder: Path, wrapped: bool
) -> None:
    spelt = read_vocabulary((folder / "tokenizer.json").read_bytes())[9]
    edit_json(folder / "generation_config.json", eos_token_id=[1, 7])
    told = {"eos_token": {"content": spelt} if wrapped else spelt}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    assert read_tokenizer(folder)[1].end == (1, 7)  # a word like any other
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    tokenizer["added_tokens"].append({**SPECIAL, "id": 9, "content": spelt})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_tokenizer(folder)[1].end == (1, 7, 9)
    edit_json(folder / "generation_config.json", eos_token_id=9)
    assert read_tokenizer(folder)[1].end == (9,)


def test_the_chat_template_is_found_in_either_place(folder: Path) -> None:
    assert read_tokenizer(folder)[1].template == ""
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": [
                    {"name": "tools", "template": "b"},
                    {"name": "default", "template": "a"},
                ]
            }
        )
    )
    assert read_tokenizer(folder)[1].template == "a"
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert read_tokenizer(folder)[1].template == "{{ messages }}"


def test_a_chat_template_in_a_file_of_a_processor_is_found(folder: Path) -> None:
    (folder / "chat_template.json").write_text('{"chat_template": "a"}')
    assert read_tokenizer(folder)[1].template == "a"
    (folder / "tokenizer_config.json").write_text('{"chat_template": "b"}')
    assert read_tokenizer(folder)[1].template == "b"


def test_named_chat_templates_are_not_the_default(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": {"tool_use": "b"}}')
    template = read_tokenizer(folder)[1].template
    words = "the model has several (rag, tool_use), none of which is named default"
    assert words in why_no_chats(template)
    (folder / "chat_template.jinja").write_text("c")
    template = read_tokenizer(folder)[1].template
    assert [
        RENDERER.render(template, {"messages": [], **own}) for own in ({}, {"tools": [{}]})
    ] == ["c", "b"]


@pytest.mark.parametrize("given", [7, ["a"], [{"name": "default"}], {"default": 7}, True])
def test_a_chat_template_of_another_kind_is_refused(folder: Path, given: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    assert "tokenizer_config.json: chat_template must be" in refusal(folder)


@pytest.mark.parametrize("empty", [None, "", " \n", [], {"default": ""}])
def test_an_empty_chat_template_is_none(folder: Path, empty: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": empty}))
    assert read_tokenizer(folder)[1].template == ""


def test_templates_read_special_tokens_as_the_tokenizer_spells_them() -> None:
    """The ids in the model's files may belong to other tokens."""
    template = (
        "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ sep_token is defined }}\n"
        "  {% for m in messages %}{{ m.content }}{% endfor %}"
    )
    own = {"bos_token": None, "eos_token": {"content": 'é"\\<end>\U0001f600'}, "unk_token": "<unk>"}
    spelt = {
        name: text["content"] if isinstance(text, dict) else text for name, text in own.items()
    }
    given = {name: text for name, text in spelt.items() if text is not None}
    messages = [{"role": "user", "content": "hello"}]
    (expected,), _ = render_jinja_template([messages], chat_template=template, **given)
    ours = {"messages": messages, "bos_token": "<s>", "eos_token": "</s>"}
    assert RENDERER.render(_special_tokens(own, template) + template, ours) == expected
    RENDERER.close()
