"""A model for agents: the embedded target with room for their prompts, and a template for tools in
the form of Hermes."""

import json
import subprocess
import sys
from pathlib import Path

from dovetail.launch.settings.models import DEMO_FOLDER

CONTEXT = 32768
WINDOWED = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "max_position_embeddings": CONTEXT,
    "num_hidden_layers": 2,
    "sliding_window": 512,
}
"""What its config.json has instead: a window and two of eight layers, so that prompts of 13,000
tokens are read in seconds. What it writes is nonsense, within the grammar if there is one."""
TEMPLATE = """\
{{ bos_token }}{% if tools %}<|user|>
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
A call is <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call><|end|>
{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>
{% if m.content %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{% elif m.role == 'tool' %}<|user|>
<tool_response>
{{ m.content }}
</tool_response><|end|>
{% elif not (tools and loop.first and m.role == 'system') %}<|user|>
{{ m.content }}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


def write_model(folder: Path) -> Path:
    """Write the model into a new folder; its weights are the embedded target's own file."""
    folder.mkdir(parents=True)
    source = DEMO_FOLDER / "target"
    for path in source.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    for name, changes in {
        "config.json": WINDOWED,
        "tokenizer_config.json": {"model_max_length": CONTEXT},
    }.items():
        fields = json.loads((source / name).read_text(encoding="utf-8"))
        (folder / name).unlink()
        (folder / name).write_text(json.dumps({**fields, **changes}), encoding="utf-8")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def write_gguf(source: Path, file: Path) -> Path:
    """Write a GGUF file again with the template for tools in ChatML's form, and with room for an
    agent's prompt."""
    template = TEMPLATE.replace("{{ bos_token }}", "").replace("<|end|>", "<|im_end|>")
    for role in ("user", "assistant"):
        template = template.replace(f"<|{role}|>", f"<|im_start|>{role}")
    script = str(Path(sys.executable).parent)
    subprocess.run(
        [f"{script}/gguf-new-metadata", "--force", "--chat-template", template, source, file],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(
        [f"{script}/gguf-set-metadata", "--force", file, "llama.context_length", str(CONTEXT)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return file
