"""huggingface_hub's InferenceClient: a tool call, and a reply by a schema."""

import json
import os
from importlib.metadata import version

os.environ.pop("HF_HUB_OFFLINE")  # it refuses loopback too

from huggingface_hub import InferenceClient

URL, MODEL = os.environ["DOVETAIL_URL"], os.environ["DOVETAIL_MODEL"]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
PAINT = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
SKY = [{"role": "user", "content": "What colour is the sky?"}]
client = InferenceClient(base_url=URL, api_key="none")
common = {"messages": SKY, "model": MODEL, "max_tokens": 200, "temperature": 0}
once = {"parallel_tool_calls": False}
reply = client.chat_completion(**common, tools=[PAINT], tool_choice="required", extra_body=once)
(call,) = reply.choices[0].message.tool_calls
assert call.function.name == "paint"
assert json.loads(call.function.arguments)["colour"] in ("red", "blue", "green")
answer = {"type": "json_schema", "json_schema": {"name": "colour", "schema": SCHEMA}}
written = client.chat_completion(**common, response_format=answer).choices[0].message.content
assert json.loads(written)["colour"] in ("red", "blue", "green")
streamed = client.chat_completion(**common, response_format=answer, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
assert text == written
print(
    json.dumps(
        {"version": version("huggingface_hub"), "what": "a tool call, a schema whole and streamed"}
    )
)
