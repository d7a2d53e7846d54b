"""A server of a tiny model, shared by the tests of a file."""

from collections.abc import Iterator

import pytest

from aquiline.loading import Loaded
from tests.serve.serving import Running, path_model, serving


@pytest.fixture(scope="module")
def model() -> Loaded:
    return path_model()


@pytest.fixture(scope="module")
def server(model: Loaded) -> Iterator[Running]:
    with serving(model) as running:
        yield running
