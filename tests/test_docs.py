"""What the pages in docs/ say is run: their Python, their configuration, their commands, their links."""

import importlib
import inspect
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import lightning_actprune
from lightning_actprune import config, schedules
from lightning_actprune.analysis import first_batch, memory, step_memory
from tests.examples.image_folders import write_images
from tests.support.helpers import assert_plain
from tests.support.markdown import code_blocks, run_blocks

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
SMALLER = {
    "max_epochs=20": "max_epochs=1",
    '"resmlp_s12", patch_size=4': '"resmlp_s12", patch_size=4, dim=64, depth=1',
    '"vit_8x384", patch_size=4': '"vit_8x384", patch_size=4, dim=64, depth=1',
}
"""What is made smaller of the page that trains on CIFAR-10, for which a tiny folder of images stands in."""


def run(page, tmp_path, monkeypatch, smaller=None):
    """Run the Python of a page in an empty folder and return its names."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / page).read_text()
    for full, small in (smaller or {}).items():
        assert full in text
        text = text.replace(full, small)
    return run_blocks(code_blocks(text, "python"), page)


def test_vision_from_scratch(tmp_path, monkeypatch):
    write_images(tmp_path / "data" / "cifar10", size=32)
    names = run("vision_from_scratch.md", tmp_path, monkeypatch, SMALLER)
    assert {layer.keep.bits for layer in names["pruning"].converted} >= {2, 3}
    assert names["monitor"].report.saved_fraction > 0.5
    assert_plain(names["model"])


def test_lora(tmp_path, monkeypatch):
    names = run("lora.md", tmp_path, monkeypatch)
    trained, frozen, pruned, others = (nbytes for nbytes, _ in names["found"].values())
    assert others < 0.5 * pruned < 0.5 * frozen < 0.5 * trained
    assert_plain(names["model"])
    packing = {row.fqn.split(".")[-1] for row in names["monitor"].report.rows if row.stored_bytes}
    assert packing == {"down", "up", "head"}  # neither frozen layers nor the projection, which is frozen too


def test_logits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own, of_transformers = code_blocks((ROOT / "docs" / "logits.md").read_text(), "python")
    names = run_blocks([own], "logits.md")
    assert names["monitor"].report.stored_bytes < names["logits"] / 8
    pytest.importorskip("transformers")
    names = run_blocks([of_transformers], "logits.md", names)
    model, tokens = names["model"].eval(), names["tokens"]
    hidden, weight = model.transformer(tokens).last_hidden_state, model.lm_head.weight
    loss = names["linear_cross_entropy"](hidden, weight, names["labels"])
    assert loss.item() == pytest.approx(model(tokens, labels=tokens).loss.item(), rel=1e-5)
    assert model.transformer.wte.weight.grad.any()


@pytest.mark.slow
def test_out_of_memory(tmp_path, monkeypatch, recwarn):
    names = run("out_of_memory.md", tmp_path, monkeypatch)
    assert names["step"].peak_without(1.0) < names["step"].peak_without(0.5) < names["step"].peak_bytes
    assert names["monitor"].report.stored_bytes < 0.5 * names["pruned"]
    assert names["data"].batch_size == 32
    assert not [w for w in recwarn if "inside an activation checkpoint" in str(w.message)]


def test_the_first_screen_of_the_site_has_the_line_to_add_and_what_it_saves():
    head = (ROOT / "docs" / "index.md").read_text().partition("\n## ")[0]
    (block,) = code_blocks(head, "python")
    assert block.endswith('\nL.Trainer(callbacks=[ActivationPruning("max")])\n')
    assert sum(row.startswith("| ") and "**-" in row for row in head.splitlines()) == 5
    assert len(head.splitlines()) < 40


def test_the_site_needs_no_other_server():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert site["theme"]["font"] is False
    for name in (*site["extra_css"], *site["extra_javascript"]):
        assert not re.search(r"url\(|https?:|import|fetch", (ROOT / "docs" / name).read_text())


TABLE = """
const made = (text) => ({
  textContent: text, style: {}, attributes: {}, listeners: {},
  getAttribute(name) { return this.attributes[name] ?? null; },
  setAttribute(name, value) { this.attributes[name] = value; },
  removeAttribute(name) { delete this.attributes[name]; },
  addEventListener(name, listener) { this.listeners[name] = listener; },
});
const heads = [made("model"), made("cosine")];
let rows = [["b", "0.9000"], ["a", "-"], ["c", "4e-07"], ["d", "12.5 %"], ...Array(30).fill(["z", "-"])];
rows = rows.map((texts) => ({ cells: texts.map(made) }));
const body = { rows, append(...sorted) { this.rows = sorted; } };
global.document = { querySelectorAll: () => [{ tHead: { rows: [{ cells: heads }] }, tBodies: [body] }] };
const shown = () => console.log(body.rows.slice(0, 4).map((row) => row.cells[0].textContent).join(""));
"""
"""A table as a browser has it, with what the script asks for."""


def test_long_tables_are_sorted_by_a_click_on_a_head():
    if shutil.which("node") is None:
        pytest.skip("there is no node to run the script")
    script = (ROOT / "docs" / "sortable.js").read_text()
    clicks = "".join(f"heads[{head}].listeners.{event}; shown();" for head, event in (
        (1, "click()"), (1, "keydown({key: 'Enter'})"), (0, "click()"), (0, "keydown({key: 'Tab'})")
    ))  # fmt: skip
    found = subprocess.run(["node", "-e", TABLE + script + clicks], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["cbda", "dbca", "abcd", "abcd"]


def test_index(tmp_path, monkeypatch):
    names = run("index.md", tmp_path, monkeypatch)
    assert {row["fqn"] for row in names["layers"]} <= {"mlp.0", "mlp.1", "mlp.2", "mlp.3"}
    assert {row["fqn"] for row in names["conversion"]} == {"mlp.0", "mlp.1", "mlp.2", "mlp.3"}
    assert {"forward", "backward"} <= {row["phase"] for row in names["moments"]}


def test_rules(tmp_path, monkeypatch):
    names = run("rules.md", tmp_path, monkeypatch)
    assert names["ruled"]["mlp.1"] == config.Keep(bits=4, sparsity=0.3, block_size=16)
    assert isinstance(names["ruled"]["mlp.3"].sparsity, schedules.StepSchedule)
    assert "mlp.0" not in names["ruled"]  # the norm, which a rule keeps dense
    assert names["scheduled"] == ["mlp.3"]
    assert set(names["rules"]) == {"0", "2"}
    assert_plain(names["model"])


def test_arguments_are_all_in_the_tables():
    text = (ROOT / "docs" / "rules.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    taken = [
        name for taker in (lightning_actprune.ActivationPruning.__init__, config.Keep) for name in parameters(taker)
    ]
    assert rows == set(taken)


def parameters(taker):
    return [name for name in inspect.signature(taker).parameters if name != "self"]


def test_memory(tmp_path, monkeypatch):
    names = run("memory.md", tmp_path, monkeypatch)
    assert len(names["epochs"]) == 1
    assert next(row for row in names["conversion"] if row["fqn"] == "mlp.1")["reason"]
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"layers.png", "epochs.png", "step.png"}


def yaml_blocks():
    return [yaml.safe_load(text) for text in code_blocks((ROOT / "docs" / "rules.md").read_text(), "yaml")]


def test_yaml_for_the_command_line_makes_the_callbacks():
    made = []
    for callback in yaml_blocks()[0]["trainer"]["callbacks"]:
        package, name = callback["class_path"].split(".")
        assert package == "lightning_actprune"
        made.append(getattr(lightning_actprune, name)(**callback.get("init_args", {})))
    pruning, monitor = made
    assert (pruning.preset, list(pruning.rules)) == ("max", ["head", "blocks.0.*", "blocks.*.fc2"])
    assert type(monitor) is lightning_actprune.ActivationMemoryMonitor


def instantiated(entry):
    """Return what Hydra's ``instantiate`` makes of a configuration: inner objects first, each by its ``_target_``."""
    if isinstance(entry, list):
        return [instantiated(each) for each in entry]
    if not isinstance(entry, dict):
        return entry
    arguments = {name: instantiated(value) for name, value in entry.items() if name != "_target_"}
    if "_target_" not in entry:
        return arguments
    module, _, name = entry["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**arguments)


def test_yaml_for_hydra_makes_the_callbacks():
    made = instantiated(yaml_blocks()[1])["callbacks"]
    pruning, monitor = made["activation_pruning"], made["activation_memory_monitor"]
    assert type(pruning) is lightning_actprune.ActivationPruning
    assert type(monitor) is lightning_actprune.ActivationMemoryMonitor
    assert repr(pruning.sparsity) == "CubicSchedule(end=0.7, start=0.0, warmup=0.1, until=1.0)"
    assert (pruning.block_size, pruning.rules) == (32, {"model.head": "dense"})


def test_every_page_is_in_the_navigation_and_every_public_name_in_the_reference():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = re.findall(r"[\w/]+\.md", str(site["nav"]))
    assert sorted(listed) == [page.name for page in PAGES]
    reference = (ROOT / "docs" / "api.md").read_text()
    for name in lightning_actprune.__all__:
        assert re.search(rf"::: lightning_actprune\.{name}$|members: .*\b{name}\b", reference, re.MULTILINE), name
    for name in re.findall(r"^::: (\S+)", reference, re.MULTILINE):
        assert_exists(name)


def assert_exists(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.slow
def test_budget(tmp_path, monkeypatch):
    names = run("budget.md", tmp_path, monkeypatch)
    assert names["pruning"].state_dict()["memory_budget"]["number"] is not None
    found = names["found"]
    assert not found.is_dense
    assert found.peak_bytes <= 120 * 2**20 < found.dense.peak_bytes
    assert names["report"].converted
    assert_plain(names["model"])


def test_migration(tmp_path, monkeypatch):
    names = run("migration.md", tmp_path, monkeypatch)
    (skipped,) = names["report"].skipped
    assert (skipped.fqn, "TheirLinear" in skipped.reason) == ("1", True)
    table = {
        name for name in re.findall(r"`(\w+)\(", (ROOT / "docs" / "migration.md").read_text()) if name[0].isupper()
    }
    known = set(dir(lightning_actprune)).union(
        dir(first_batch), dir(memory), dir(step_memory), dir(config), dir(schedules)
    )
    assert table - {"FSDPStrategy"} <= known


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_and_commands_lead_somewhere(page):
    text = page.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
        assert (page.parent / link).is_file()
    for path in re.findall(r"(?<![\w/.])(?:docs|examples|tests)/[\w/.]+\.(?:py|md|yaml|ipynb|png)", text):
        assert (ROOT / path).is_file(), path
    for block in code_blocks(text, "bash"):
        for line in block.splitlines():
            assert shlex.split(line)


def test_the_citation_is_that_of_the_readme():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    paper = cited["preferred-citation"]
    assert {"type", "title", "authors", "year", "url"} <= set(paper)
    names = " & ".join(author["family-names"] for author in paper["authors"])
    assert f"[{names}, {paper['year']}]({paper['url']})" in (ROOT / "README.md").read_text()
    assert paper["doi"].endswith(paper["url"].split("/")[-1])


def test_the_version_is_the_newest_one_of_the_changelog_and_the_one_to_cite():
    releases = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == ("Unreleased", "")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert releases[1] == (lightning_actprune.__version__, str(cited["date-released"]))
    assert cited["version"] == lightning_actprune.__version__
