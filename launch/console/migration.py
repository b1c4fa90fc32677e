"""The names that llama-server, vLLM and ollama have for things, and ours.

The tables are the ones of the manual (a test compares them with `launch/README.md`), and they are
what an unknown option or command is answered with. Nothing here is accepted as an option.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

LLAMA, VLLM, BOTH = "llama-server", "vLLM", "llama-server, vLLM"


@dataclass(frozen=True)
class Foreign:
    """Options of another program that mean the same, and what to write here instead."""

    written: str
    """Their names, separated by spaces."""
    whose: str
    here: str

    @property
    def names(self) -> list[str]:
        return self.written.split()


MODEL = "`--target MODEL`: a GGUF file, a folder in the Hugging Face layout or a hub id"
CONTEXT = "`--target.context N` bounds prompt and reply together; by default it is the model's own"
EXPERTS = (
    "`--target.split.device cuda:0 --target.split.layers N --target.split.parts mixer` leaves the "
    "experts of the last N layers to the CPU; `dovetail plan` predicts whether that is faster"
)
LOGS = (
    "nothing to set: logs go to stderr, `dovetail top` shows the rounds; `--json` has all figures"
)
PROMPT = "`dovetail generate PROMPT`; a file of them: `dovetail generate --prompts FILE`"
LAYERS = (
    "`--target.split.device cuda:0 --target.split.layers N` computes the last N layers on the GPU; "
    "`--target.device cuda:0 --target.resident N` keeps N there and streams the others"
)
DEVICE = "`--target.device cuda:0`, `--draft.device cuda:0`"
SEED = "the field `seed` of a request; `dovetail generate --seed N`"
GPUS = "a target uses one GPU beside the CPU: `--target.split.device cuda:0`"
DRAFT = "`--draft MODEL`, or a kind of draft such as `--draft ngram`"
DRAFTED = "`--tree.gamma N` nodes and `--tree.depth N` levels at most; fewer where that is faster"
CHOSEN = "nothing to set: `--policy goodput`, the default, drafts as much as pays"
NOTHING = "nothing to set"
TEMPLATE = "the checkpoint's own; `dovetail generate --raw` uses none"
UNSERVED = "not supported"

FLAGS = (
    Foreign("-m", LLAMA, MODEL),
    Foreign("--model", BOTH, MODEL),
    Foreign("-hf -hfr --hf-repo", LLAMA, "`--target ID` or `--target ID@REVISION`"),
    Foreign("-mu --model-url", LLAMA, MODEL),
    Foreign("--revision", VLLM, "`--target ID@REVISION`"),
    Foreign("--tokenizer", VLLM, "nothing to set: the checkpoint's own"),
    Foreign("--trust-remote-code", VLLM, "no code of a checkpoint is ever run"),
    Foreign("-c --ctx-size", LLAMA, f"{CONTEXT} (`-c` names a file of settings)"),
    Foreign("--max-model-len", VLLM, CONTEXT),
    Foreign("-ngl --gpu-layers --n-gpu-layers", LLAMA, LAYERS),
    Foreign("-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe", LLAMA, EXPERTS),
    Foreign("--enable-expert-parallel", VLLM, GPUS),
    Foreign("-dev", LLAMA, DEVICE),
    Foreign("--device", BOTH, DEVICE),
    Foreign("-sm --split-mode -ts --tensor-split -mg --main-gpu", LLAMA, GPUS),
    Foreign(
        "-tp --tensor-parallel-size -pp --pipeline-parallel-size -dp --data-parallel-size",
        VLLM,
        GPUS,
    ),
    Foreign("--gpu-memory-utilization", VLLM, "`--memory.vram 8GB`, in bytes and not as a share"),
    Foreign("--cpu-offload-gb", VLLM, "`--target.device cuda:0 --memory.vram 8GB`"),
    Foreign("-fit --fit -fitt --fit-target", LLAMA, "`--memory.vram 8GB`"),
    Foreign(
        "--dtype", VLLM, "`--weights half` (the checkpoint's 16 bits), `--weights fp32` or `bf16`"
    ),
    Foreign("-q --quantization", VLLM, "`--weights int8`, made from the checkpoint at load"),
    Foreign(
        "-ctk --cache-type-k -ctv --cache-type-v",
        LLAMA,
        "`--target.cache fp32` or `half`, for keys and values together; no fewer bits",
    ),
    Foreign("--kv-cache-dtype", VLLM, "`--target.cache fp32` or `half`; no fewer bits"),
    Foreign("-t --threads -tb --threads-batch", LLAMA, "`--target.threads N`"),
    Foreign("--numa", LLAMA, "`--target.numa auto`, `shard`, a node, a list of nodes, or `off`"),
    Foreign(
        "-C --cpu-mask -Cr --cpu-range",
        LLAMA,
        "`--cores 0-3` of `dovetail worker` and `dovetail coordinator`",
    ),
    Foreign("-b --batch-size -ub --ubatch-size", LLAMA, NOTHING),
    Foreign(
        "--max-num-batched-tokens --enable-chunked-prefill",
        VLLM,
        "nothing to set: prefill is chunked; `--coordinator.latency_ms MS` bounds a pass that has "
        "a chunk",
    ),
    Foreign("--block-size", VLLM, NOTHING),
    Foreign("-fa --flash-attn --mlock --mmap --no-mmap", LLAMA, NOTHING),
    Foreign("--enforce-eager", VLLM, NOTHING),
    Foreign(
        "-np --parallel",
        LLAMA,
        "nothing to set: as many requests run as memory allows, others wait in a queue "
        "(`--coordinator.queue N`); a file of prompts: `dovetail generate --prompts FILE "
        "--parallel N`",
    ),
    Foreign(
        "--max-num-seqs",
        VLLM,
        "nothing to set: as many requests run as memory allows, others wait in a queue "
        "(`--coordinator.queue N`); `--coordinator.key_sessions N` bounds those of an API key",
    ),
    Foreign("-cb --cont-batching", LLAMA, "nothing to set: always on"),
    Foreign("-md --model-draft --spec-draft-model", LLAMA, DRAFT),
    Foreign("-hfd --hf-repo-draft --spec-draft-hf", LLAMA, DRAFT),
    Foreign("--speculative-model", VLLM, DRAFT),
    Foreign(
        "-sc --speculative-config",
        VLLM,
        "`--draft MODEL` or a kind such as `--draft eagle3`, and `--tree.gamma N`",
    ),
    Foreign(
        "--spec-type",
        LLAMA,
        "`--draft KIND`: a smaller model is `small`, a look-up `ngram`, heads `eagle3` and others",
    ),
    Foreign("--draft-max --draft-n --spec-draft-n-max", LLAMA, DRAFTED),
    Foreign("--num-speculative-tokens", VLLM, DRAFTED),
    Foreign(
        "--draft-min --draft-n-min --spec-draft-n-min --draft-p-min "
        "--spec-draft-p-min --draft-p-split --spec-draft-p-split",
        LLAMA,
        CHOSEN,
    ),
    Foreign(
        "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl -devd "
        "--device-draft --spec-draft-device",
        LLAMA,
        "`--draft.device cuda:0`; a draft lies on one device",
    ),
    Foreign("--temp", LLAMA, "`--temperature T`; without it replies are greedy"),
    Foreign("-s", LLAMA, SEED),
    Foreign("--seed", BOTH, SEED),
    Foreign("-n --predict --n-predict", LLAMA, "`--max-tokens N`"),
    Foreign("--repeat-penalty", LLAMA, "`--repetition-penalty X`, over prompt and reply"),
    Foreign("--repeat-last-n", LLAMA, "nothing to set: penalties see all of prompt and reply"),
    Foreign("-l", LLAMA, "`--logit-bias TOKEN=BIAS`"),
    Foreign("--ignore-eos", LLAMA, "the field `ignore_eos` of a request; `--min-tokens N`"),
    Foreign("-r --reverse-prompt", LLAMA, "`dovetail generate --stop TEXT`"),
    Foreign("--grammar --grammar-file -j --json-schema -jf --json-schema-file", LLAMA, UNSERVED),
    Foreign("--enable-auto-tool-choice --tool-call-parser", VLLM, UNSERVED),
    Foreign("--reasoning-parser", VLLM, "nothing to set: a reply is shown as it is decoded"),
    Foreign("--jinja --chat-template-file", LLAMA, TEMPLATE),
    Foreign("--chat-template", BOTH, TEMPLATE),
    Foreign(
        "--default-chat-template-kwargs",
        VLLM,
        "`--http.chat_template_kwargs JSON` of a server; `--chat-template-kwargs JSON` of "
        "`generate` and `chat`; `chat_template_kwargs` of a request",
    ),
    Foreign("--generation-config", VLLM, "`--sampling.generation_config auto` or `none`"),
    Foreign("--lora --lora-scaled", LLAMA, "not supported: merge it into the checkpoint"),
    Foreign("--enable-lora --lora-modules", VLLM, "not supported: merge it into the checkpoint"),
    Foreign("-mm --mmproj", LLAMA, "not supported: models read text only"),
    Foreign("--embedding --embeddings --rerank --reranking", LLAMA, UNSERVED),
    Foreign(
        "--host", BOTH, "`--http.host ADDRESS`; beyond loopback with `--http.api_key_file FILE`"
    ),
    Foreign("--port", BOTH, "`--http.port N`; 8000 by default, 0 for any free one"),
    Foreign("--api-key", BOTH, "`--http.api_key_file FILE`, so that no list of processes has it"),
    Foreign("--api-key-file", LLAMA, "`--http.api_key_file FILE`"),
    Foreign("-a --alias", LLAMA, "`--http.model NAME`"),
    Foreign("--served-model-name", VLLM, "`--http.model NAME`"),
    Foreign("-to --timeout", LLAMA, "`--http.deadline_s S`, `--http.receive_s S`"),
    Foreign("--metrics --slots", LLAMA, "nothing to set: `/metrics` and the dashboard at `/`"),
    Foreign("--ssl-key-file --ssl-cert-file", LLAMA, "put nginx or Caddy in front"),
    Foreign("--ssl-keyfile --ssl-certfile", VLLM, "put nginx or Caddy in front"),
    Foreign(
        "--cache-prompt --no-cache-prompt --cache-reuse",
        LLAMA,
        "`--coordinator.reuse true`, the default, or `false`",
    ),
    Foreign(
        "--enable-prefix-caching --no-enable-prefix-caching",
        VLLM,
        "`--coordinator.reuse true`, the default, or `false`",
    ),
    Foreign("--keepalive", "ollama", "nothing to set: a model stays until `dovetail serve` ends"),
    Foreign("-p --prompt -f --file", LLAMA, PROMPT),
    Foreign("-v -lv --log-verbosity --log-file --log-disable", LLAMA, LOGS),
    Foreign("--verbose", "llama-server, ollama", LOGS),
    Foreign("--disable-log-requests --disable-log-stats --uvicorn-log-level", VLLM, LOGS),
    Foreign("-fitc --fit-ctx", LLAMA, CONTEXT),
    Foreign("--max-seq-len-to-capture --max-seq-len", VLLM, CONTEXT),
)
"""Options of others, and what to write here."""

COMMANDS = {
    "run": "`dovetail chat --target MODEL`, or `dovetail generate --target MODEL PROMPT`",
    "pull": "`hf download ID`; then `--target ID`",
    "list": "models are folders, or lie in the cache of the Hugging Face hub",
    "ls": "models are folders, or lie in the cache of the Hugging Face hub",
    "ps": "`dovetail status`",
    "show": "`dovetail plan --target MODEL`",
    "stop": "Ctrl-C or SIGTERM for `dovetail serve`; one worker: `dovetail drain WORKER`",
    "complete": "`dovetail generate --connect http://HOST:PORT PROMPT`",
    "run-batch": "`dovetail generate --prompts FILE --out RESULTS`",
}
"""Commands of ollama and vLLM, and what to write here."""

RESTART = (
    "requests outlive the coordinator in its journal (coordinator.journal), and `dovetail serve`, "
    "systemd or Kubernetes starts it again"
)
REMOVED = {"--standby": RESTART, "--standby-of": RESTART}
"""Options of earlier releases, and what replaces them."""

_BY_NAME = {name: foreign for foreign in FLAGS for name in foreign.names}


def advice(arguments: Sequence[str], option: str) -> str | None:
    """Return what to write instead of the unknown `option` of this command line, if it is one of
    another program or of an earlier release; None if it is neither.

    The parser names one letter of an option such as `-ngl`, so that it is looked for in
    `arguments`.
    """
    if option in REMOVED:
        return f"{option} has been removed: {REMOVED[option]}"
    for name in _candidates(arguments, option):
        if name in _BY_NAME:
            foreign = _BY_NAME[name]
            return f"there is no option {name} ({foreign.whose}); in dovetail: {foreign.here}"
    return None


def _candidates(arguments: Sequence[str], option: str) -> Iterator[str]:
    letters = len(option) == 2
    for argument in arguments:
        name = argument.partition("=")[0]
        if name == option or (letters and name[:2].count("-") == 1 and option[1] in name[1:]):
            yield name


def context_size(value: str) -> str | None:
    """Return what is meant by `-c VALUE` where that is no file of settings: the size of a context,
    or the rest of an option such as `-ctk`; None if it is neither."""
    if value.isdigit():
        return f"-c names a file of settings, and {value} is none: {CONTEXT}"
    return advice((f"-c{value}",), "-c")


def extra_argument(message: str, context: click.Context | None) -> str | None:
    """Return how a model is named, if `message` complains of an argument that a command does not
    take and the command has a target; else None."""
    if context is None or "unexpected extra argument" not in message:
        return None
    if not any("--target" in parameter.opts for parameter in context.command.params):
        return None
    return f"{message.rstrip('.')}: a model is named by --target MODEL"
