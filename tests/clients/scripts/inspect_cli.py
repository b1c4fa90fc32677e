"""inspect-ai: a small evaluation over a data set in memory."""

import json
import os
from importlib.metadata import version

from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

os.environ["LOCAL_BASE_URL"], os.environ["LOCAL_API_KEY"] = os.environ["DOVETAIL_URL"], "none"
os.environ["VLLM_BASE_URL"], os.environ["VLLM_API_KEY"] = os.environ["DOVETAIL_URL"], "none"
MODEL = os.environ["DOVETAIL_MODEL"]

samples = [
    Sample(input="Why is the sky blue?", target="sky"),
    Sample(input="Tell me a story about a small owl.", target="owl"),
]
task = Task(dataset=MemoryDataset(samples), solver=[generate()], scorer=includes())
config = GenerateConfig(temperature=0.0, max_tokens=48)
for model in (f"openai-api/local/{MODEL}", f"vllm/{MODEL}"):
    (log,) = eval(
        task,
        model=model,
        display="none",
        log_dir="logs",
        temperature=config.temperature,
        max_tokens=config.max_tokens,
    )
    assert log.status == "success", log.error
    assert all(sample.output.completion for sample in log.samples)
    assert log.results.scores[0].metrics["accuracy"].value > 0
print(
    json.dumps(
        {
            "version": version("inspect-ai"),
            "what": "openai-api/local/ and vllm/, two samples each, scored",
        }
    )
)
