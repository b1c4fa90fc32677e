"""instructor: an object by a tool call, and by a schema."""

import json
import os
from importlib.metadata import version
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

URL, MODEL = os.environ["DOVETAIL_URL"], os.environ["DOVETAIL_MODEL"]


class Colour(BaseModel):
    """The colour of a thing."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["red", "blue", "green"]
    bright: bool


ONCE = {"parallel_tool_calls": False}
for mode, more in ((instructor.Mode.TOOLS, ONCE), (instructor.Mode.JSON_SCHEMA, {})):
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none"), mode=mode)
    found = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What colour is the sky?"}],
        response_model=Colour,
        temperature=0,
        max_tokens=200,
        max_retries=0,
        **more,
    )
    assert isinstance(found, Colour)
print(json.dumps({"version": version("instructor"), "what": "an object by a tool, by a schema"}))
