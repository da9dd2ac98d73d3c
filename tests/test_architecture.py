"""The shape of the package: who imports whom, what importing it costs, what it offers."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_actprune
from lightning_actprune import functional

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

NAME = "lightning_actprune"
ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / NAME
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 300

# What each part may import besides itself; the most specific row counts.
BELOW_CALLBACKS = {
    "arguments",
    "conversion",
    "conversion_options",
    "conversion_report",
    "energy",
    "footprint",
    "functional",
    "holders",
    "layer_settings",
    "nn",
    "ops",
    "schedules",
    "sensitivity",
    "sensitivity_grid",
    "sensitivity_probe",
    "sensitivity_report",
}
BELOW_CALLBACKS |= {"few_bit_saving", "pictures", "presets", "recomputed", "selection", "step_memory", "step_recorder"}
ALLOWED = {
    "arguments": set(),
    "schedules": {"arguments"},
    "kernels": {"ops.activations", "ops.block_selection", "ops.formats", "ops.geometry", "ops.operators"},
    "ops.operators": set(),
    "ops.block_selection": {"arguments", "ops.formats"},
    "ops.formats": set(),
    "ops.activations": {"ops.formats"},
    "ops.geometry": {"arguments", "ops.formats"},
    "ops": {"arguments", "kernels"},
    "functional": {"arguments", "ops"},
    "nn": {
        "arguments",
        "functional",
        "ops.activations",
        "ops.affine",
        "ops.autocast",
        "ops.convolution",
        "ops.convolution_plan",
        "ops.derived",
        "ops.dropout",
        "ops.gated",
        "ops.geometry",
        "ops.line_norm",
        "ops.line_plan",
        "ops.norm",
        "ops.scaled_sum",
        "ops.setting",
    },
    "layer_settings": {"arguments", "schedules"},
    "conversion_options": {"arguments", "layer_settings", "nn", "ops.setting", "schedules"},
    "selection": {"conversion_options", "layer_settings", "nn"},
    "conversion_report": {"arguments"},
    "other_layers": {"conversion_options", "conversion_report", "few_bit_saving", "hooks", "nn", "selection"},
    "conversion": {
        "arguments",
        "conversion_options",
        "conversion_report",
        "layer_settings",
        "nn",
        "other_layers",
        "schedules",
        "selection",
    },
    "copies": {"ops"},
    "calls": {"arguments", "copies", "nn", "ops"},
    "hooks": set(),
    "saved": {"calls", "copies", "hooks", "nn", "ops", "selection", "shared_context"},
    "shared_context": set(),
    "following": {"hooks", "nn", "ops.setting", "selection"},
    "recomputed": {"following", "hooks", "nn", "ops.setting", "selection"},
    "energy": {"arguments", "conversion", "conversion_report", "following", "hooks", "nn", "ops", "selection"},
    "step_memory": {"arguments"},
    "step_recorder": {"calls", "hooks", "saved", "selection", "step_memory"},
    "pictures": {"step_memory"},
    "presets": {"arguments"},
    "name_patterns": set(),
    "sensitivity": {"arguments", "conversion_options", "sensitivity_grid", "sensitivity_probe", "sensitivity_report"},
    "sensitivity_grid": {"arguments", "conversion_options", "nn", "ops", "selection"},
    "sensitivity_input": {"nn", "ops", "sensitivity_grid"},
    "sensitivity_picture": set(),
    "sensitivity_report": {
        "arguments",
        "conversion_report",
        "name_patterns",
        "sensitivity_grid",
        "sensitivity_picture",
    },
    "sensitivity_sums": {"conversion_report", "nn", "ops", "selection"}
    | {"sensitivity_grid", "sensitivity_input", "sensitivity_report"},
    "sensitivity_probe": {"conversion", "conversion_report", "hooks", "nn", "selection", "shared_context"}
    | {"sensitivity_grid", "sensitivity_input", "sensitivity_report", "sensitivity_sums"},
    "provenance": set(),
    "held": {"ops", "provenance"},
    "saved_operation": {"held", "ops"},
    "few_bit_saving": {"arguments", "held", "hooks", "ops", "provenance", "saved_operation", "selection"},
    "footprint": {"calls", "saved", "selection", "step_memory"},
    "holders": {
        "arguments",
        "calls",
        "conversion",
        "conversion_report",
        "hooks",
        "nn",
        "saved",
        "selection",
        "shared_context",
    },
    "callbacks": BELOW_CALLBACKS,
    "__init__": BELOW_CALLBACKS | {"callbacks"},
    "environment": {"ops"},
    "__main__": BELOW_CALLBACKS | {NAME, "environment"},
}
ONLY_IN = {"lightning": "callbacks", "lightning_utilities": "callbacks", "triton": "kernels"}
ONLY_IN |= {"transformers": "nn.conv1d"}

each_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))


def module_name(path: Path) -> str:
    """``ops/geometry.py`` -> ``ops.geometry``, ``ops/__init__.py`` -> ``ops``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Yield the full name of every imported module, wherever in the file the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} is a relative import"
            for alias in node.names:
                target = PACKAGE.parent.joinpath(*node.module.split("."), alias.name)
                is_module = target.is_dir() or target.with_suffix(".py").is_file()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def belongs(module: str, part: str) -> bool:
    return module == part or module.startswith(f"{part}.")


@each_file
def test_imports_follow_the_direction(path):
    module = module_name(path)
    rows = [part for part in ALLOWED if belongs(module, part)]
    assert rows, f"{module} is a new part of the package: give it a row in ALLOWED"
    part = max(rows, key=len)
    own = {target.removeprefix(f"{NAME}.") for target in imports(path) if belongs(target, NAME)}
    wrong = {target for target in own if not any(belongs(target, other) for other in ALLOWED[part] | {part})}
    assert not wrong, f"{module} must not import {sorted(wrong)}"


@each_file
def test_third_party_imports_stay_in_their_part(path):
    for target in imports(path):
        part = ONLY_IN.get(target.split(".")[0])
        assert part is None or belongs(module_name(path), part), f"only {part} may import {target}"


def test_the_walk_sees_the_imports_it_must_judge():
    found = {(module_name(path), target) for path in FILES for target in imports(path)}
    assert ("ops.pack", f"{NAME}.kernels.pack") in found  # inside a function
    assert ("__init__", f"{NAME}.functional") in found  # from the package itself
    assert ("kernels.pack", "triton.language") in found
    assert any(module.startswith("callbacks") and target.startswith("lightning.") for module, target in found)


@each_file
def test_file_is_short(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield public functions and classes and their public methods, overrides and setters left out."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in tree.body:
        if isinstance(node, (*functions, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, node
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, functions) and not method.name.startswith("_"):
                    marks = {ast.unparse(d).split(".")[-1] for d in method.decorator_list}
                    if not marks & {"override", "setter", "overload"}:
                        yield f"{node.name}.{method.name}", method


@each_file
def test_module_and_public_definitions_have_docstrings(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    missing = [name for name, node in definitions(tree) if not ast.get_docstring(node)]
    assert missing == []


def test_import_starts_no_cuda_and_loads_no_kernel():
    # Torch and Lightning come first: what they ask of CUDA is not ours. `is_initialized` alone would prove nothing
    # on a machine without a GPU, so every way into CUDA is blocked.
    script = f"""
import json, sys
import lightning.pytorch, torch
calls = []
for name in ("_lazy_init", "init", "device_count", "is_available", "get_device_capability", "current_device"):
    setattr(torch.cuda, name, lambda *_, name=name, **__: calls.append(name))
import {NAME}
kernels = [name for name in sys.modules if name.startswith("{NAME}.kernels.")]
print(json.dumps([calls, kernels, torch.cuda.is_initialized(), "{NAME}.ops.library" in sys.modules]))
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [[], [], False, True]


def test_public_names_are_those_of_the_design():
    promised = {"ActivationMemoryMonitor", "ActivationPrunedLinear", "ActivationPruning", "SparsitySchedule"}
    promised |= {"convert", "functional", "revert"}
    assert promised <= set(lightning_actprune.__all__)
    assert {"linear", "pack"} <= set(functional.__all__)


@pytest.mark.parametrize("module", [lightning_actprune, functional], ids=lambda m: m.__name__)
def test_all_is_sorted_and_resolves(module):
    assert list(module.__all__) == sorted(set(module.__all__))
    documented = {name for name in module.__all__ if getattr(module, name).__doc__}
    assert documented == set(module.__all__)


def test_all_lists_everything_the_package_imports():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    bound = {a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert bound == set(lightning_actprune.__all__)


def test_package_is_marked_as_typed_and_version_has_one_source():
    assert (PACKAGE / "py.typed").is_file()
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in config["project"]["dynamic"]
    assert "version" not in config["project"]
    source = ROOT / config["tool"]["hatch"]["version"]["path"]
    assert source == PACKAGE / "__init__.py"
    found = re.findall(r'^__version__ = "(\d+\.\d+\.\d+\S*)"$', source.read_text(), re.MULTILINE)
    assert found == [lightning_actprune.__version__]
