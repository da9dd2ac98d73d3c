"""The README's commands and Python run, and what it says of versions is true."""

import re
from pathlib import Path

import pytest
from torch import nn

from tests.support.helpers import assert_plain

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def code_blocks(page, language):
    """Return the blocks of ``language`` in the text of a page."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.mark.integration
def test_python_blocks_run_in_order_and_restore_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line, quickstart, plain, rules = code_blocks(README, "python")
    namespace = {"__name__": "readme"}
    exec(compile(quickstart, "README.md", "exec"), namespace)
    model, pruning, monitor = (namespace[name] for name in ("model", "pruning", "monitor"))
    assert {layer.operator for layer in pruning.converted} == {"norm", "linear", "activation"}
    assert monitor.report.saved_fraction > 0.5
    assert_plain(model)
    exec(compile(plain, "README.md", "exec"), namespace)
    assert {layer.fqn for layer in namespace["report"].converted} == {"0", "1", "2", "3"}
    assert [type(layer) for layer in namespace["network"]] == [nn.LayerNorm, nn.Linear, nn.GELU, nn.Linear]
    assert namespace["network"][1].weight.grad is not None
    exec(compile(rules, "README.md", "exec"), namespace)
    kept = {layer.fqn: layer.keep.bits for layer in namespace["pruning"].converted}
    assert (kept["mlp.0"], kept["mlp.1"]) == (8, 4)
    assert "mlp.3" not in kept
    assert_plain(model)
    exec(compile(line, "README.md", "exec"), namespace)
    assert [type(callback) for callback in namespace["trainer"].callbacks[:2]] == [type(pruning), type(monitor)]


def test_ci_runs_exactly_the_test_command():
    (command,) = (line for block in code_blocks(README, "bash") for line in block.splitlines() if "pytest" in line)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_links_to_headings_lead_somewhere():
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in README.splitlines()}
    links = set(re.findall(r"\]\(#([^)]+)\)", README))
    assert links
    assert links <= headings


def test_badges_say_what_the_package_needs():
    project = (ROOT / "pyproject.toml").read_text()
    badges = (ROOT / "docs" / "badges.svg").read_text()
    for name, bound in (("Python", 'requires-python = "'), ("PyTorch", '"torch'), ("Lightning", '"lightning')):
        least = re.search(rf"^ *{bound}>=([0-9.]+)", project, re.MULTILINE)[1]
        assert f"{name} {least}+" in badges
        assert f"{name} {least}+" in README
        assert f">{least}+</text>" in badges
