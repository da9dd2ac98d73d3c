"""What the pages in docs/ say is run: their Python, their commands, their links."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

import lightning_actprune
from lightning_actprune import config, schedules
from lightning_actprune.analysis import first_batch, memory
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
    assert names["pruning"].spread
    assert names["monitor"].report.saved_fraction > 0.5
    assert_plain(names["model"])


def test_lora(tmp_path, monkeypatch):
    names = run("lora.md", tmp_path, monkeypatch)
    trained, frozen, pruned, others = (nbytes for nbytes, _ in names["found"].values())
    assert others < 0.5 * pruned < 0.5 * frozen < 0.5 * trained
    assert_plain(names["model"])
    packing = {row.fqn.split(".")[-1] for row in names["monitor"].report.rows if row.stored_bytes}
    assert packing == {"down", "up", "head"}  # neither frozen layers nor the projection, which is frozen too


def test_out_of_memory(tmp_path, monkeypatch, recwarn):
    names = run("out_of_memory.md", tmp_path, monkeypatch)
    assert names["step"].peak_without(1.0) < names["step"].peak_without(0.5) < names["step"].peak_bytes
    assert names["monitor"].report.total_bytes < 0.5 * names["pruned"]
    assert names["data"].batch_size == 32
    assert not [w for w in recwarn if "inside an activation checkpoint" in str(w.message)]


def test_migration(tmp_path, monkeypatch):
    names = run("migration.md", tmp_path, monkeypatch)
    (skipped,) = names["report"].skipped
    assert (skipped.fqn, "TheirLinear" in skipped.reason) == ("1", True)
    table = {
        name for name in re.findall(r"`(\w+)\(", (ROOT / "docs" / "migration.md").read_text()) if name[0].isupper()
    }
    known = set(dir(lightning_actprune)).union(dir(first_batch), dir(memory), dir(config), dir(schedules))
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
