"""The shape of the package: who imports whom, what importing it costs, what it offers."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_actprune
from lightning_actprune import functional
from lightning_actprune.codec import private
from tests.support.walk import walk

NAME = "lightning_actprune"
ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / NAME
LAYERS = (
    {"config", "schedules"},
    {"codec.formats", "codec.blocks", "codec.private"},
    {"kernels"},
    {"codec"},
    {"compiled"},
    {"operators"},
    {"functional", "convert", "replay", "report"},
    {"analysis"},
    {"callbacks"},
    {"integrations"},
    {"commands"},
    {"__init__", "__main__"},
)
"""A module imports from its own layer and from those before it. ``codec.formats`` is not of the layer ``codec``."""
FOR_KERNELS = {"codec.formats", "codec.blocks", "codec.private", "codec.dispatch", "kernels"}
"""All that kernels may know of the package; ``codec.dispatch`` for what runs inside an operator."""
ONLY_IN = {
    "lightning": "callbacks",
    "lightning_utilities": "callbacks",
    "triton": "kernels",
    "transformers": "integrations",
}


def modules() -> dict[str, Path]:
    """Return the files of the package: ``codec.formats``, ``codec`` for its ``__init__.py``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Yield the full name of every imported module, wherever in the file the import stands."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} is a relative import"
            for alias in node.names:
                target = PACKAGE.parent.joinpath(*node.module.split("."), alias.name)
                is_module = target.is_dir() or target.with_suffix(".py").is_file()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def layer(module: str) -> int:
    """Return the number of the layer that ``module`` belongs to: that of the longest name that fits."""
    fits = [
        (len(part), number)
        for number, parts in enumerate(LAYERS)
        for part in parts
        if f"{module}.".startswith(f"{part}.")
    ]
    assert fits, f"{module} belongs to no layer"
    return max(fits)[1]


def own_imports(path: Path) -> set[str]:
    """Return the modules of this package that a file imports."""
    found = {target.removeprefix(f"{NAME}.") for target in imports(path) if target.split(".")[0] == NAME}
    return found - {NAME}


def test_imports_point_one_way():
    wrong = []
    for module, path in modules().items():
        for target in own_imports(path):
            below = layer(target) <= layer(module)
            if layer(target) == layer("codec") and layer(module) == layer("kernels"):
                below = target == "codec.dispatch"
            if layer(module) == layer("kernels") and ".".join(target.split(".")[:2]) not in FOR_KERNELS:
                below = target.split(".")[0] == "kernels"
            wrong += [] if below else [f"{module} imports {target}"]
    assert wrong == []


def test_other_packages_stay_in_their_part():
    found = {(module, target) for module, path in modules().items() for target in imports(path)}
    for module, target in found:
        part = ONLY_IN.get(target.split(".")[0])
        assert part is None or module.split(".")[0] == part, f"{module} imports {target}: only {part} may"
    # The walk sees what it must judge.
    assert any(module.startswith("kernels.") and target.startswith("triton") for module, target in found)


PRIVATE = re.compile(r"_[A-Za-z]\w*")
PRIVATE_OF_TORCH = re.compile(r"torch(\.\w+)*\._[A-Za-z]\S*")
ELSEWHERE = {
    ("callbacks.memory", "_batches_that_stepped"),
    ("operators.experts", "_experts_implementation"),  # of a configuration of transformers
    ("operators.hooks", "_compiler_ctx"),  # of a compiled LightningModule
    ("operators.hooks", "_getframe"),  # Python's
    ("operators.hooks", "_orig_mod"),  # of a compiled module, if there is one
    ("operators.readers", "_saved_self_sym_sizes"),  # of the node of an index
}
"""Private names of others that may stand in a module, which has good reasons."""


def docstrings(tree: ast.AST) -> set[ast.AST]:
    return {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def dotted(node: ast.AST) -> str:
    """Return ``"torch._C.name"`` of such an expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private_of_torch(path: Path) -> Iterator[str]:
    """Yield the private names of torch that a file imports, reads, or has in a text."""
    tree = tree_of(path)
    ignored = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in ignored:
            found = [node.value]
        elif isinstance(node, ast.Attribute):
            found = [re.sub(r"^(F|nn)\.", "torch.nn.", dotted(node))]
        else:
            continue
        yield from (name for name in found if PRIVATE_OF_TORCH.match(name))


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file defines, or gives to what it makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            yield node.attr


def private_attributes(tree: ast.AST) -> Iterator[str]:
    """Yield the private attributes that a file reads of anything, also by ``getattr``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            yield node.attr
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr"):
            names = [argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
            yield from (name for name in names if PRIVATE.fullmatch(name))


def test_private_names_of_torch_stand_in_one_module():
    files = modules()
    home = files.pop("codec.private")
    found = {(module, name) for module, path in files.items() for name in private_of_torch(path)}
    assert found == set()
    assert "torch._C._len_torch_dispatch_stack" in private_of_torch(home)  # the walk sees what it must judge


def test_private_attributes_of_others_are_listed():
    files = {module: tree_of(path) for module, path in modules().items() if module != "codec.private"}
    own = {name for tree in files.values() for name in own_names(tree)} | {"_replace"}
    found = {(module, name) for module, tree in files.items() for name in private_attributes(tree) if name not in own}
    listed = {name for names in private.ATTRIBUTES.values() for name in names} | set(private.OPTIONAL)
    assert {(module, name) for module, name in found if name not in listed} == ELSEWHERE
    read = {name for tree in files.values() for name in private_attributes(tree)}
    put_together = {"_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_saved_ord"}
    assert listed - read == put_together


def test_the_surface_is_small():
    root = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert len(root) <= 8
    assert len(lightning_actprune.__all__) <= 10
    for module in (lightning_actprune, functional):
        assert all(getattr(module, name).__doc__ for name in module.__all__)


WALKS = {
    "linear": (lambda: (nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()), 2, (2, 16, 64), (6, 9)),
    "gelu": (lambda: (nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), 1, (2, 16, 64), (5, 8)),
    "batch norm": (lambda: (nn.Conv2d(4, 64, 3), nn.BatchNorm2d(64), nn.Sigmoid()), 1, (2, 4, 8, 8), (5, 8)),
}


@pytest.mark.skipif(find_spec("triton") is None, reason="counts on the kernels' path")
@pytest.mark.parametrize("name", WALKS)
def test_an_input_crosses_few_files(name):
    layers, at, shape, (files, switches) = WALKS[name]
    walked = walk(*layers(), at=at, x=torch.randn(shape))
    assert walked[0] <= files
    assert walked[1] <= switches


@pytest.mark.integration
def test_importing_starts_no_cuda_and_loads_no_kernel():
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
print(json.dumps([calls, kernels, torch.cuda.is_initialized()]))
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == [[], [], False]
