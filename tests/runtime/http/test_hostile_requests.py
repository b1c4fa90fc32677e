"""Requests that mean harm or nothing are refused with 4xx and by name, and the next one is answered
as ever."""

import pytest

from hostile.requests import WRONG, Wrong, try_request
from support.web import Api, Backend


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_request_that_cannot_be_is_refused_by_name(server: Api, wrong: Wrong) -> None:
    tried = try_request(server, wrong)
    assert tried.passed, tried


def test_what_clients_say_makes_no_metric_and_no_label(server: Api, house: Backend) -> None:
    before = names_of(server)
    for name in ('demo"} 1\nforged_metric 1', "a" * 500, "\u202e"):
        server.client.post(
            "/v1/completions",
            json={"prompt": "w5", "model": name, "user": name},
            headers={"x-request-id": "1"},
        )
        server.client.get(f"/v1/models/{'a' * 200}", headers={"x-request-id": "2"})
    assert names_of(server) == before
    house.until_idle()


def names_of(server: Api) -> list[str]:
    """Metrics and their labels, without their values."""
    return [line.rpartition(" ")[0] for line in server.client.get("/metrics").text.splitlines()]
