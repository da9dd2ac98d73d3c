"""Code and YAML of README and the pages in docs/ run, what they name exists, and the wheel holds what it should."""

import importlib
import inspect
import re
import shlex
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from torch import nn

import lightning_actprune
from lightning_actprune import config, schedules
from tests.support.helpers import assert_plain

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(page, language):
    """Return the blocks of ``language`` in the text of a page."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def pages():
    """Return the pages with Python, those with packages that are no dependency as ``foreign``, or with many nightly."""
    for path in PAGES:
        blocks = code_blocks(path.read_text(), "python")
        if blocks:
            packages = set(re.findall(r"(?:import|from) (transformers|timm|peft|monai)\b", "\n".join(blocks)))
            mark = "nightly" if "monai" in packages else "foreign" if packages else "integration"
            yield pytest.param(path, marks=getattr(pytest.mark, mark), id=path.name)


@pytest.mark.parametrize("page", list(pages()))
def test_python_of_the_page_runs(page, tmp_path, monkeypatch, recwarn):
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    names, blocks = {"__name__": page.name}, code_blocks(text, "python")
    if page == README:
        blocks.append(blocks.pop(0))  # shows one line of what the second one has in full
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)
    globals().get(f"check_{page.stem}", lambda names: None)(names)  # what names have to be in the end
    assert not [w for w in recwarn if "inside an activation checkpoint" in str(w.message)]


def check_README(names):
    kept = {layer.fqn: (layer.operator, layer.keep.bits) for layer in names["report"].converted}
    assert kept == {"0": ("norm", 8), "1": ("linear", 2), "2": ("activation", 3)}
    assert [type(layer) for layer in names["network"]] == [nn.LayerNorm, nn.Linear, nn.GELU, nn.Linear]
    assert names["network"][1].weight.grad is not None
    assert names["monitor"].report.saved_fraction > 0.5
    assert {layer.fqn for layer in names["pruning"].converted} == {"mlp.0", "mlp.1", "mlp.2", "mlp.3"}
    assert_plain(names["model"])
    ours = lightning_actprune.ActivationPruning, lightning_actprune.ActivationMemoryMonitor
    assert tuple(type(callback) for callback in names["trainer"].callbacks[:2]) == ours


def check_lora(names):
    found, report = names["found"], names["report"]
    assert found["LoRA, balanced"] < 0.5 * found["LoRA"] < 0.5 * found["all weights trained"]
    assert report.skipped
    assert all("lora_B" in layer.fqn for layer in report.skipped)


def check_more_models(names):
    kept = names["kept"]
    assert len(kept) == 6 * 4
    for name, _ in kept:
        assert min(kept[name, "max"], kept[name, "recompute"]) < 0.5 * kept[name, "dense"]


def check_index(names):
    assert {row["fqn"] for row in names["conversion"]} == {"mlp.0", "mlp.1", "mlp.2", "mlp.3"}
    assert {"forward", "backward"} <= {row["phase"] for row in names["moments"]}


def check_rules(names):
    assert names["ruled"]["mlp.1"] == config.Keep(4, 0.3, 16, max_dropped_energy=0.2, min_rows_for_low_bits=1024)
    assert isinstance(names["ruled"]["mlp.3"].sparsity, schedules.StepSchedule)
    assert "mlp.0" not in names["ruled"]  # the norm, which a rule keeps dense
    assert names["scheduled"] == ["mlp.3"]
    assert set(names["rules"]) == {"0", "2"}
    assert_plain(names["model"])


def check_memory(names):
    assert len(names["epochs"]) == 1
    assert next(row for row in names["conversion"] if row["fqn"] == "blocks.0.mlp.1")["reason"]
    assert {path.name for path in Path("figures").iterdir()} == {"layers.png", "epochs.png", "step.png"}
    assert names["step"].peak_without(1.0) < names["step"].peak_without(0.5) < names["step"].peak_bytes
    assert {row.method for row in names["estimated"].rows} >= {"dense", "max"}
    assert not names["found"].is_dense
    assert names["found"].peak_bytes <= 120 * 2**20 < names["found"].dense.peak_bytes
    assert {layer.fqn.split(".")[1] for layer in names["pruning"].converted} == {"1", "2", "3"}  # 0 is a checkpoint
    assert names["loaded"].batch_size == 32
    assert_plain(names["net"])


def check_plain_pytorch(names):
    assert names["watch"].memory.stored_bytes < 0.5 * names["watch"].memory.dense_bytes
    (skipped,) = names["report"].skipped
    assert (skipped.fqn, "TheirLinear" in skipped.reason) == ("1", True)


def build(entry):
    """Return what a configuration makes, of LightningCLI or of Hydra."""
    if isinstance(entry, list):
        return [build(each) for each in entry]
    if not isinstance(entry, dict):
        return entry
    built = {name: build(value) for name, value in entry.items()}
    path = built.pop("class_path", None) or built.pop("_target_", None)
    if path is None:
        return built
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(**built.get("init_args", built))


def test_yaml_makes_the_callbacks():
    cli, hydra = map(yaml.safe_load, code_blocks((ROOT / "docs" / "rules.md").read_text(), "yaml")[:2])
    monitor = lightning_actprune.ActivationMemoryMonitor
    first, second = build(cli["trainer"]["callbacks"])
    assert (first.preset, list(first.rules), type(second)) == ("max", ["head", "blocks.0.*", "blocks.*.fc2"], monitor)
    first, second = build(hydra["callbacks"]).values()
    assert repr(first.sparsity) == "CubicSchedule(end=0.7, start=0.0, warmup=0.1, until=1.0)"
    assert (first.block_size, first.rules, type(second)) == (32, {"model.head": "dense"}, monitor)


def test_all_arguments_and_public_names_are_in_the_pages():
    rows = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "rules.md").read_text(), re.MULTILINE))
    takers = lightning_actprune.ActivationPruning.__init__, config.Keep
    assert rows == {name for taker in takers for name in inspect.signature(taker).parameters} - {"self"}
    reference = (ROOT / "docs" / "api.md").read_text()
    for name in set(lightning_actprune.__all__) - {"__version__"}:
        assert re.search(rf"::: lightning_actprune\.{name}$|members: .*\b{name}\b", reference, re.MULTILINE), name


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_and_commands_lead_somewhere(page):
    text = page.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
        assert (page.parent / link).is_file(), link
    lines = prose.splitlines()
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in lines}
    assert headings.issuperset(re.findall(r"\]\(#([^)]+)\)", prose))
    for path in re.findall(r"(?<![\w/.])(?:docs|examples|benchmarks|tests)/[\w/.]+\.(?:py|md|yaml|ipynb|png)", text):
        assert (ROOT / path).is_file(), path
    for block in code_blocks(text, "bash"):
        for line in block.splitlines():
            assert shlex.split(line)


def test_ci_runs_exactly_the_test_command_of_readme():
    blocks = code_blocks(README.read_text(), "bash")
    (command,) = (line for block in blocks for line in block.splitlines() if "pytest" in line)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_badges_say_what_the_package_needs():
    project = (ROOT / "pyproject.toml").read_text()
    badges = (ROOT / "docs" / "badges.svg").read_text()
    for name, bound in (("Python", 'requires-python = "'), ("PyTorch", '"torch'), ("Lightning", '"lightning')):
        least = re.search(rf"^ *{bound}>=([0-9.]+)", project, re.MULTILINE)[1]
        assert f"{name} {least}+" in badges
        assert f"{name} {least}+" in README.read_text()
        assert f">{least}+</text>" in badges


def test_the_version_is_the_newest_one_of_the_changelog_and_the_one_to_cite():
    releases = re.findall(r"^## \[(.+?)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert releases[0] == (lightning_actprune.__version__, str(cited["date-released"]))
    assert cited["version"] == lightning_actprune.__version__


# What would be published.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.iterdir()
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.mark.integration
def test_wheel_holds_the_package_and_nothing_else(wheel):
    metadata = f"lightning_actprune-{lightning_actprune.__version__}.dist-info"
    names = {name for name in wheel.namelist() if not name.startswith(f"{metadata}/")}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lightning_actprune").rglob("*.py")}
    assert names == sources | {"lightning_actprune/py.typed"}
    described = {name.removeprefix(f"{metadata}/") for name in wheel.namelist()} - names
    assert described == {"METADATA", "RECORD", "WHEEL", "licenses/LICENSE"}


@pytest.mark.integration
def test_metadata_are_those_of_the_project(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == lightning_actprune.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"cli", "plots", "transformers", "examples", "dev", "docs"} == set(metadata.get_all("Provides-Extra"))
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert urls["Paper"] in (ROOT / "CITATION.cff").read_text()


def test_what_runs_in_fits_needs_no_extra():
    text = (ROOT / "pyproject.toml").read_text()
    needed = set(re.findall(r'^  "([a-z]+)>=', text.split("[project.urls]")[0], re.MULTILINE))
    assert needed == {"torch", "lightning", "torchmetrics", "torchvision", "triton", "rich"}
