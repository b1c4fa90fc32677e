"""langchain-openai: a chat model with invoke, stream and batch, and the text model."""

import json
import os
from importlib.metadata import version

from langchain_openai import ChatOpenAI, OpenAI

URL, MODEL = os.environ["DOVETAIL_URL"], os.environ["DOVETAIL_MODEL"]

chat = ChatOpenAI(
    base_url=URL, api_key="none", model=MODEL, temperature=0, max_tokens=16, stream_usage=True
)
reply = chat.invoke("Why is the sky blue?")
assert reply.content
assert reply.usage_metadata["output_tokens"] > 0
chunks = list(chat.stream("Why is the sky blue?"))
assert "".join(chunk.content for chunk in chunks) == reply.content
assert (
    sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks)
    == reply.usage_metadata["output_tokens"]
)
assert [other.content for other in chat.batch(["Why is the sky blue?"] * 2)] == [reply.content] * 2
text = OpenAI(base_url=URL, api_key="none", model=MODEL, temperature=0, max_tokens=8)
assert "".join(text.stream("Once upon")) == text.invoke("Once upon")
print(
    json.dumps(
        {
            "version": version("langchain-openai"),
            "what": "ChatOpenAI invoke, stream with usage, batch; OpenAI invoke, stream",
        }
    )
)
