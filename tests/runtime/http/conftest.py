"""One coordinator with scripted workers, and one server before it, for all tests that only ask
things."""

from collections.abc import Iterator

import pytest

from support.web import Api, Backend, api, backend


@pytest.fixture(scope="session")
def house() -> Iterator[Backend]:
    with backend() as started:
        yield started


@pytest.fixture(scope="session")
def server(house: Backend) -> Iterator[Api]:
    with api(
        house.address, "--http.receive_s=2", "--policy=dynamic", "--tree.insist=true"
    ) as started:
        yield started
