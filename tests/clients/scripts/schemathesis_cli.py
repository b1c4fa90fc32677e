"""schemathesis: requests made from the OpenAPI document, wrong ones too; no answer may be a
server's error or undocumented."""

import json
import os
import subprocess
from importlib.metadata import version

ROOT = os.environ["DOVETAIL_URL"].removesuffix("/v1")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"  # noqa: E501
run = [
    "schemathesis",
    "run",
    f"{ROOT}/openapi.json",
    "--url",
    ROOT,
    "--checks",
    CHECKS,
    "--max-examples",
    "60",
    "--request-timeout",
    "60",
    "--seed",
    "1",
    "--no-color",
]
done = subprocess.run(run, capture_output=True, text=True, stdin=subprocess.DEVNULL)
assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
told = [
    line.strip() for line in done.stdout.splitlines() if "generated" in line or "passed" in line
]
print(
    json.dumps({"version": version("schemathesis"), "what": "; ".join(told[-3:]) or "no finding"})
)
