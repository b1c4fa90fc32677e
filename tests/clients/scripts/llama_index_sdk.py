"""llama-index: a call of a function, and an object by a tool call."""

import json
import os
from importlib.metadata import version
from typing import Literal

from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL, MODEL = os.environ["DOVETAIL_URL"], os.environ["DOVETAIL_MODEL"]


class Colour(BaseModel):
    """The colour of a thing."""

    name: Literal["red", "blue", "green"]
    bright: bool


def paint(colour: Literal["red", "blue", "green"]) -> str:
    """Paint the wall."""
    return colour


llm = OpenAILike(
    model=MODEL,
    api_base=URL,
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0,
    max_tokens=200,
    max_retries=0,
)
reply = llm.chat_with_tools(
    [FunctionTool.from_defaults(paint)], user_msg="Paint the wall blue.", tool_choice="required"
)
(call,) = llm.get_tool_calls_from_response(reply)
assert call.tool_name == "paint"
assert paint(**call.tool_kwargs) in ("red", "blue", "green")
found = llm.as_structured_llm(Colour).complete("What colour is the sky?").raw
assert isinstance(found, Colour)
print(
    json.dumps(
        {
            "version": version("llama-index-llms-openai-like"),
            "what": "a function call, an object by a tool",
        }
    )
)
