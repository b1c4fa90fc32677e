"""litellm: as an OpenAI server and as a vLLM one, streaming, text completions, and its mapping of
errors."""

import json
import os
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

URL, MODEL = os.environ["DOVETAIL_URL"], os.environ["DOVETAIL_MODEL"]
ASKED = {
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "api_base": URL,
    "api_key": "none",
    "max_tokens": 16,
    "temperature": 0,
}

reply = litellm.completion(model=f"openai/{MODEL}", **ASKED)
for provider in ("openai", "hosted_vllm"):
    chunks = list(litellm.completion(model=f"{provider}/{MODEL}", stream=True, **ASKED))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        == reply.choices[0].message.content
    ), provider
text = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}",
    prompt="Once upon",
    api_base=URL,
    api_key="none",
    max_tokens=8,
    temperature=0,
)
assert text.choices[0].text
for wrong, kind in (
    ({"model": "openai/unknown"}, litellm.NotFoundError),
    ({"model": f"openai/{MODEL}", "top_p": 7}, litellm.BadRequestError),
):
    try:
        litellm.completion(**{**ASKED, **wrong})
    except kind:
        continue
    raise AssertionError(f"no {kind.__name__}")
print(
    json.dumps(
        {
            "version": version("litellm"),
            "what": "openai/ and hosted_vllm/, stream, text completion, errors",
        }
    )
)
