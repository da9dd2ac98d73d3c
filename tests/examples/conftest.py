"""What the tests of the examples share."""

import pytest

from tests.examples.image_folders import write_images


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images") / "tiny")
