"""What the README says is run: its Python, its commands, its tables."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

import lightning_actprune
from examples.benchmarks import tables
from tests.support.markdown import code_blocks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return code_blocks(README, language)


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


def test_the_shown_retained_layer_is_found_in_the_network_with_a_relu(tmp_path, monkeypatch, capfd):
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
    text = blocks("yaml")[0]
    for callback in yaml.safe_load(text)["trainer"]["callbacks"]:
        made = getattr(lightning_actprune, callback["class_path"].split(".")[-1])(**callback.get("init_args", {}))
        assert made is not None


def instantiated(config):
    """Return what Hydra's ``instantiate`` makes of a configuration: inner objects first, each by its ``_target_``."""
    if isinstance(config, list):
        return [instantiated(entry) for entry in config]
    if not isinstance(config, dict):
        return config
    arguments = {name: instantiated(value) for name, value in config.items() if name != "_target_"}
    if "_target_" not in config:
        return arguments
    module, _, name = config["_target_"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**arguments)


def test_hydra_block_makes_the_callbacks():
    made = instantiated(yaml.safe_load(blocks("yaml")[1]))["callbacks"]
    pruning, monitor = made["activation_pruning"], made["activation_memory_monitor"]
    assert type(pruning) is lightning_actprune.ActivationPruning
    assert type(monitor) is lightning_actprune.ActivationMemoryMonitor
    assert repr(pruning.sparsity) == "CubicSchedule(end=0.7, start=0.0, warmup=0.1, until=1.0)"
    assert (pruning.block_size, pruning.rules) == (32, {"model.head": "dense"})


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
