"""`vllm bench serve`, some requests at once: all succeed, with the tokens that were asked for, and
it finds what speculation did among our metrics."""

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
    *("vllm", "bench", "serve", "--backend=openai-chat", "--endpoint=/v1/chat/completions"),
    *(f"--base-url={URL.removesuffix('/v1')}", f"--model={MODEL}", f"--tokenizer={TOKENIZER}"),
    *("--dataset-name=random", f"--random-input-len={PROMPT}", f"--random-output-len={REPLY}"),
    *(f"--num-prompts={REQUESTS}", f"--max-concurrency={STREAMS}", "--ignore-eos"),
    *("--temperature=0", "--disable-tqdm", "--save-result", "--result-filename=found.json"),
]
environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
done = subprocess.run(
    run, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment
)
assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
found = json.loads(Path("found.json").read_text())
assert (found["completed"], found["failed"]) == (REQUESTS, 0), found["errors"]
assert found["total_output_tokens"] == REQUESTS * REPLY, found["total_output_tokens"]
assert min(found["median_ttft_ms"], found["median_tpot_ms"]) > 0, found
assert "Speculative Decoding" in done.stdout, done.stdout[-3000:]
what = (
    f"{REQUESTS} requests, {STREAMS} at once: {found['output_throughput']:.0f} tokens/s, TTFT "
    f"{found['median_ttft_ms']:.0f} ms, TPOT {found['median_tpot_ms']:.1f} ms, ITL "
    f"{found['median_itl_ms']:.1f} ms"
)
print(json.dumps({"version": version("vllm"), "what": what}))
