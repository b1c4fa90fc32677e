"""guidellm's load generator, some requests at once: all succeed, with the tokens that were asked
for and a first one before the end."""

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

URL, MODEL, TOKENIZER = (
    os.environ[name] for name in ("DOVETAIL_URL", "DOVETAIL_MODEL", "DOVETAIL_TOKENIZER")
)
REQUESTS, PROMPT, REPLY, STREAMS = 8, 64, 32, 2
run = [
    "guidellm",
    "run",
    f"--backend=kind=openai_http,target={URL.removesuffix('/v1')},model={MODEL}",
    f"--tokenizer=kind=hf_auto,model={TOKENIZER}",
    f"--data=kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={REPLY}",
    f"--profile=kind=concurrent,streams={STREAMS}",
    f"--constraint=kind=max_requests,count={REQUESTS}",
    "--output=kind=json,path=report.json",
    "--disable-console-interactive",
]
done = subprocess.run(run, capture_output=True, text=True, stdin=subprocess.DEVNULL)
assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
(benchmark,) = json.loads(Path("report.json").read_text())["benchmarks"]
metrics, requests = benchmark["metrics"], benchmark["requests"]
assert metrics["request_totals"]["successful"] == REQUESTS, metrics["request_totals"]
assert metrics["request_totals"]["errored"] == 0, requests["errored"]
for request in requests["successful"]:
    assert request["output_tokens"] == REPLY, request["output_tokens"]
    assert request["prompt_tokens"] >= PROMPT, request["prompt_tokens"]
    assert request["response_metrics"]["finish_reason"] == "length"
    first_s = request["time_to_first_token_ms"] / 1e3
    assert 0 < first_s < request["request_latency"], request
rate = metrics["output_tokens_per_second"]["successful"]["mean"]
first_ms, gap_ms = (
    metrics[name]["successful"]["median"]
    for name in ("time_to_first_token_ms", "inter_token_latency_ms")
)
what = (
    f"{REQUESTS} requests, {STREAMS} at once: {rate:.0f} tokens/s, first token in {first_ms:.0f} "
    f"ms, {gap_ms:.1f} ms a token"
)
print(json.dumps({"version": version("guidellm"), "what": what}))
