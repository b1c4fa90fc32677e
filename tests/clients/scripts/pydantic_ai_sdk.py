"""pydantic-ai: an agent whose output is a schema by `response_format`, and by a tool call."""

import json
import os
from importlib.metadata import version
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = os.environ["DOVETAIL_URL"], os.environ["DOVETAIL_MODEL"]


class Colour(BaseModel):
    """The colour of a thing."""

    name: Literal["red", "blue", "green"]
    bright: bool


model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
for output in (NativeOutput(Colour), ToolOutput(Colour)):
    agent = Agent(model, output_type=output, model_settings={"temperature": 0, "max_tokens": 200})
    assert isinstance(agent.run_sync("What colour is the sky?").output, Colour)
print(json.dumps({"version": version("pydantic-ai-slim"), "what": "output by a schema, by a tool"}))
