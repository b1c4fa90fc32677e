"""Chat templates with tools, as short as each family's format of calls allows."""

from collections.abc import Mapping
from typing import Any

TURNS = """{{ bos_token }}{% if tools %}<|user|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>
{% endif %}{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>
{% if m.reasoning_content and loop.last %}OPEN{{ m.reasoning_content }}CLOSE{% endif %}\
{{ m.content or '' }}{% if m.tool_calls %}CALLS{% endif %}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
EACH = "{% for c in m.tool_calls %}CALL{% endfor %}"
LISTED = EACH.replace("CALL", "{{ ', ' if not loop.first }}CALL")
JSON = """{"name": "{{ c.function.name }}", "KEY": {{ c.function.arguments | tojson }}}"""
ARGUMENTS = JSON.replace("KEY", "arguments")
TAGGED = "{% for k, v in c.function.arguments.items() %}TAGS{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"
GEMMA = (
    "{% for k, v in c.function.arguments.items() %}{{ ',' if not loop.first }}{{ k }}:"
    """{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}{% endfor %}"""
)
CALLS: Mapping[str, str] = {
    "hermes": EACH.replace("CALL", f"<tool_call>\n{ARGUMENTS}\n</tool_call>\n"),
    "llama": EACH.replace("CALL", JSON.replace("KEY", "parameters")),
    "mistral": EACH.replace(
        "CALL", "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    ),
    "mistral_list": "{% if m.tool_calls[0].id | length != 9 %}{{ raise_exception('an id of 9') }}"
    "{% endif %}[TOOL_CALLS] ["
    + LISTED.replace("CALL", ARGUMENTS.replace("}}}", """}}, "id": "{{ c.id }}"}"""))
    + "]",
    "phi": "<|tool_call|>[" + LISTED.replace("CALL", ARGUMENTS) + "]<|/tool_call|>",
    "granite": "<|tool_call|>[" + LISTED.replace("CALL", ARGUMENTS) + "]",
    "deepseek": "<｜tool▁calls▁begin｜>"
    + EACH.replace(
        "CALL",
        "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
        "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>",
    )
    + "<｜tool▁calls▁end｜>",
    "qwen3_coder": EACH.replace(
        "CALL",
        "<tool_call>\n<function={{ c.function.name }}>\n"
        + TAGGED.replace("TAGS", "<parameter={{ k }}>\n" + VALUE + "\n</parameter>\n")
        + "</function>\n</tool_call>\n",
    ),
    "glm": EACH.replace(
        "CALL",
        "<tool_call>{{ c.function.name }}\n"
        + TAGGED.replace(
            "TAGS", "<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE + "</arg_value>\n"
        )
        + "</tool_call>\n",
    ),
    "olmo": "<function_calls>"
    "{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}="
    "{{ v | tojson }}{% endfor %}){{ '\n' if not loop.last }}{% endfor %}</function_calls>",
    "gemma": EACH.replace(
        "CALL", "<|tool_call>call:{{ c.function.name }}{{ '{' }}" + GEMMA + "{{ '}' }}<tool_call|>"
    ),
    "harmony": EACH.replace(
        "CALL",
        "<|channel|>commentary to=functions.{{ c.function.name }} <|constrain|>json<|message|>"
        "{{ c.function.arguments | tojson }}<|call|>",
    ),
}
"""How a template of each family writes the calls of a message."""
THOUGHTS: Mapping[str, tuple[str, str]] = {
    "gemma": ("<|channel>thought\n", "<channel|>"),
    "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    "mistral": ("[THINK]", "[/THINK]"),
    "llama": ("", ""),
}
TEMPLATES: Mapping[str, str] = {
    name: TURNS.replace("CALLS", calls)
    .replace("OPEN", THOUGHTS.get(name, ("<think>\n", ""))[0])
    .replace("CLOSE", THOUGHTS.get(name, ("", "\n</think>\n\n"))[1])
    for name, calls in CALLS.items()
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "description": "The time."}}
MARKERS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"),
    *("[THINK]", "[/THINK]", "<|tool_call|>", "<|/tool_call|>", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|call|>", "<|return|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<arg_key>"),
    *("</arg_key>", "<arg_value>", "</arg_value>", "<function_calls>", "</function_calls>"),
)
"""The special tokens of the families' vocabularies."""
