"""Decodes by `dovetail generate` and by a service, with a draft, and prints what came out, a line
each: run on the host and in the virtual machine, whose lines are to be equal. Standard library
only. Arguments: GGUF files, whose first tokens are printed, too."""

import json
import subprocess
import sys
import urllib.request

DOVETAIL = (sys.executable, "-P", "-m", "dovetail.launch.cli")
PROMPT = "Tell me a story about a hedgehog."
TOKENS, SEED = 12, 7
ASKED = ("--json", f"--seed={SEED}", "--tree.insist=true", PROMPT)


def generate(name: str, *options: str, tokens: int = TOKENS) -> None:
    """Print the token ids of `generate`, which reports how it goes on stderr."""
    command = [*DOVETAIL, "generate", f"--max-tokens={tokens}", *options, *ASKED]
    result = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    drafted = "with" if result["drafted_tokens"] else "without"
    print(f"generate, {name}:", result["token_ids"], drafted, "proposals", flush=True)


def post(url: str) -> str:
    """Return the text of a completion over HTTP at temperature 1."""
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": TOKENS,
        "temperature": 1,
        "seed": SEED,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def main(files: list[str]) -> None:
    generate("int8, T = 1", "--weights=int8", "--draft.device=cpu", "--temperature=1")
    command = [*DOVETAIL, "serve", "--weights=fp32", "--draft.device=cpu", "--http.port=0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().strip()
        generate("served, fp32, T = 0", "--temperature=0")
        generate("served, fp32, T = 1", "--temperature=1")
        print("HTTP, fp32, T = 1:", ascii(post(url)), flush=True)
    finally:
        server.terminate()
        print("serve's exit code:", server.wait(), flush=True)
    for file in files:
        generate(file, f"--target={file}", "--draft=ngram", tokens=4)


if __name__ == "__main__":
    main(sys.argv[1:])
