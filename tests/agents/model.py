"""A model for agents: the embedded target with room for their prompts, and a template for tools in
the form of Hermes."""

import json
from pathlib import Path

from dovetail.launch.settings.models import DEMO_FOLDER

CONTEXT = 32768
LAYERS = 2
"""Of the target's 8: prompts of 13,000 tokens are read in seconds, and what it writes is nonsense
within the grammar either way."""
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


def write_model(folder: Path, layers: int = LAYERS) -> Path:
    """Write the model into a new folder; its weights are the embedded target's own file."""
    folder.mkdir(parents=True)
    source = DEMO_FOLDER / "target"
    for path in source.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    for name, changes in {
        "config.json": {"max_position_embeddings": CONTEXT, "num_hidden_layers": layers, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 512},
        "tokenizer_config.json": {"model_max_length": CONTEXT},
    }.items():
        fields = json.loads((source / name).read_text(encoding="utf-8"))
        (folder / name).unlink()
        (folder / name).write_text(json.dumps({**fields, **changes}), encoding="utf-8")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder
