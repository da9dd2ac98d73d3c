"""What the README says is run: its Python, its commands, its tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from examples.benchmarks import tables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_blocks_run_in_order_and_print_the_shown_table(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    first, *others = blocks("python")
    exec(compile(first, "README.md", "exec"), namespace)
    out, err = capfd.readouterr()
    printed = {" ".join(line.split()) for line in (out + err).splitlines()}
    shown = [" ".join(line.split()) for line in blocks("text")[0].splitlines() if "│" in line]
    assert len(shown) == 4
    memory = [" ".join(line.split()) for line in blocks("text")[2].splitlines() if line[0] not in "┏┡└├"]
    assert len(memory) == 15
    for line in shown + memory:
        assert line in printed
    for block in others:
        exec(compile(block, "README.md", "exec"), namespace)
    assert [layer.fqn for layer in namespace["pruning"].converted] == ["mlp.3"]
    assert type(namespace["model"][0]).__name__ == "Linear"


def test_the_shown_held_layer_is_found_in_the_network_with_a_relu(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    code = blocks("python")[0]
    assert "nn.GELU()" in code
    exec(compile(code.replace("nn.GELU()", "nn.ReLU()"), "README.md", "exec"), {"__name__": "readme"})
    text = "".join(capfd.readouterr())
    printed = {" ".join(line.split()) for line in text.splitlines()}
    shown = [" ".join(line.split()) for line in blocks("text")[1].splitlines() if line[0] not in "┏┡└"]
    assert len(shown) == 5
    assert " ".join(shown[:2]) in " ".join(text.split())  # lines break where the console of the progress bar ends
    for line in shown[2:]:
        assert line in printed


def test_yaml_block_names_importable_classes():
    (text,) = blocks("yaml")
    import lightning_actprune

    for callback in yaml.safe_load(text)["trainer"]["callbacks"]:
        made = getattr(lightning_actprune, callback["class_path"].split(".")[-1])(**callback.get("init_args", {}))
        assert made is not None


def test_ci_runs_exactly_the_test_command():
    commands = [line for block in blocks("bash") for line in block.splitlines() if "pytest" in line]
    assert len(commands) == 1
    assert commands[0] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_commands_name_files_that_exist():
    for block in blocks("bash"):
        for path in re.findall(r"examples/[\w/.]+", block):
            assert (ROOT / path).is_file()


def test_pictures_exist():
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).is_file()


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_are_generated_from_the_committed_figures(name):
    assert f"<!-- table: {name} -->" in README
    assert tables.rendered(README) == README
