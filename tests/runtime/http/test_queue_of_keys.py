"""Requests of several API keys that wait for room, over HTTP."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dovetail.protocol.messages import Open
from support.patience import PATIENCE_S
from support.scripted import ScriptedTarget
from support.web import Api, api, backend

KEYS = "fedcba9876543210", "0123456789abcdef"
PROMPTS = dict(zip(KEYS, ("w5 w6", "w7 w8"), strict=True))
MANY = 6


def ask(server: Api, key: str) -> int:
    body = {"prompt": PROMPTS[key], "max_tokens": 12, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    return server.client.post("/v1/completions", json=body, headers=headers).status_code


def test_a_key_that_asks_for_little_does_not_wait_for_one_that_asks_for_much(
    tmp_path: Path,
) -> None:
    path, first, second = tmp_path / "keys", *KEYS
    path.write_text("\n".join(KEYS), encoding="utf-8")
    path.chmod(0o600)
    with backend(target=False, draft=False) as house:
        target = house.add(ScriptedTarget, "target", limits={"context": 512, "sessions": 1})
        house.held = True
        with (
            api(house.address, f"--http.api_key_file={path}") as server,
            ThreadPoolExecutor(MANY + 1) as threads,
        ):
            many = [threads.submit(ask, server, first) for _ in range(MANY)]
            house.until(lambda: len(house.coordinator._shared.queue) == MANY - 1)
            one = threads.submit(ask, server, second)
            house.until(lambda: len(house.coordinator._shared.queue) == MANY)
            metrics = server.client.get("/metrics").text
            lengths = [line for line in metrics.splitlines() if "dovetail_queue_length{" in line]
            assert sorted(float(line.split()[-1]) for line in lengths) == [1, MANY - 1]
            assert not any(key in metrics for key in KEYS)
            house.held = False
            assert {request.result(PATIENCE_S) for request in (*many, one)} == {200}
    begun = [command.prompt for command in target.seen if isinstance(command, Open)]
    others = begun[0]
    place = next(place for place, prompt in enumerate(begun) if prompt != others)
    assert len(begun) == MANY + 1
    assert place <= 2, "behind the one that ran, and at most one that had waited for longer"
