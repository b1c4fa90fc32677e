"""lm-eval's local-completions: log-likelihoods through echo. What it computed is printed, to be
compared with another engine's."""

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

from transformers import AutoTokenizer

URL, MODEL, TOKENIZER = (
    os.environ[name] for name in ("DOVETAIL_URL", "DOVETAIL_MODEL", "DOVETAIL_TOKENIZER")
)
QUESTIONS = (
    ("Question: What colour is the sky on a clear day?\nAnswer:", (" blue", " green", " seven")),
    ("Question: How many legs does a dog have?\nAnswer:", (" four", " a hundred", " sky")),
    ("Once upon a time there was a small", (" owl", " of", " the the")),
)
Path("questions.jsonl").write_text(
    "".join(json.dumps({"question": q, "choices": c, "answer": 0}) + "\n" for q, c in QUESTIONS)
)
Path("ours.yaml").write_text(
    "task: ours\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
    "questions.jsonl\ntest_split: test\noutput_type: multiple_choice\n"
    "doc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: "
    "'{{answer}}'\ntarget_delimiter: ''\nmetric_list:\n  - metric: acc\n"
)
arguments = f"model={MODEL},base_url={URL}/completions,tokenizer={TOKENIZER},tokenizer_backend=huggingface,tokenized_requests=False,max_length=512,num_concurrent=4"  # noqa: E501
run = [
    "lm_eval",
    "--model",
    "local-completions",
    "--model_args",
    arguments,
    "--tasks",
    "ours",
    "--include_path",
    ".",
    "--output_path",
    "out",
    "--log_samples",
]
done = subprocess.run(run, capture_output=True, text=True, stdin=subprocess.DEVNULL)
assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
scores = []
for line in next(Path("out").rglob("samples_ours*.jsonl")).read_text().splitlines():
    sample = json.loads(line)
    for (context, continuation), (score, _) in zip(
        [
            tuple(argument.values())[:2] if isinstance(argument, dict) else argument
            for argument in sample["arguments"].values()
        ]
        if isinstance(sample["arguments"], dict)
        else sample["arguments"],
        [response[0] for response in sample["resps"]],
        strict=True,
    ):
        whole, before = (
            tokenizer(context + continuation)["input_ids"],
            tokenizer(context)["input_ids"],
        )
        scores.append((whole[: len(before)], whole[len(before) :], float(score)))
assert len(scores) == sum(len(choices) for _, choices in QUESTIONS)
print(
    json.dumps(
        {
            "version": version("lm-eval"),
            "scores": scores,
            "what": f"{len(scores)} log-likelihoods by echo",
        }
    )
)
