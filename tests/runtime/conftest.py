"""Coordinators in memory that a test has left are put away once they hold many descriptors."""

import gc
from collections.abc import Iterator

import psutil
import pytest

MANY = 256


@pytest.fixture(autouse=True)
def few_descriptors() -> Iterator[None]:
    yield
    if psutil.Process().num_fds() > MANY:
        gc.collect()
