import pytest

from aquiline.native.library import Library, find_library


@pytest.fixture(scope="session")
def library() -> Library:
    found, why = find_library()
    assert found is not None, why
    return found
