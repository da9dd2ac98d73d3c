"""What would be published: the wheel holds the package and nothing else, and its metadata are those of the project."""

import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import lightning_actprune

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_actprune"
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.iterdir()
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_the_package_and_nothing_else(wheel):
    metadata = f"lightning_actprune-{lightning_actprune.__version__}.dist-info"
    names = {name for name in wheel.namelist() if not name.startswith(f"{metadata}/")}
    sources = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}
    assert names == sources | {"lightning_actprune/py.typed"}
    described = {name.removeprefix(f"{metadata}/") for name in wheel.namelist()} - names
    assert described == {"METADATA", "RECORD", "WHEEL", "licenses/LICENSE"}


def test_metadata_are_those_of_the_project(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == lightning_actprune.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"cli", "plots", "examples", "dev", "docs"} == set(metadata.get_all("Provides-Extra"))
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert urls["Paper"] in (ROOT / "CITATION.cff").read_text()


def test_what_runs_in_fits_needs_no_extra():
    text = (ROOT / "pyproject.toml").read_text()
    needed = set(re.findall(r'^  "([a-z]+)>=', text.split("[project.urls]")[0], re.MULTILINE))
    assert needed == {"torch", "lightning", "torchmetrics", "torchvision", "triton", "rich"}
