"""Train a step, and measure one, as if torch had not some of its private names: one process for each, forked."""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import warnings
from contextlib import nullcontext

# These imports take longer than all else: before the processes are forked.
import lightning.pytorch  # noqa: F401
import torch
import torch._inductor.compile_fx
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SIZE = 128
FINE = {kind: {"bits": 8} for kind in ("type:convolution", "type:activation", "type:norm", "type:scale", "type:saved")}
RULES = {"type:linear": {"bits": 4}, **FINE}
"""Norms are kept in more bits than the linear layers behind them, which so take over what is kept."""
resolve_name = pkgutil.resolve_name


class Model(nn.Module):
    """Has linear layers that share their input, attention, norms, a convolution, GELU and a product by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.attention = nn.MultiheadAttention(SIZE, 4, batch_first=True)
        self.gate, self.up, self.down = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.convolution = nn.Conv1d(SIZE, SIZE, 3, padding=1)
        self.gelu = nn.GELU()
        self.scale = Scale()

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.gelu(self.gate(x)) + self.up(x))

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = self.last(x)
        x = x + (self.mlp(y) if reentrant is None else checkpoint(self.mlp, y, use_reentrant=reentrant))
        return self.scale(x + self.convolution(x.transpose(1, 2)).transpose(1, 2))


class Scale(nn.Module):
    """Is no layer that is known: what it saves is packed by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.child = nn.Parameter(torch.full((SIZE,), 0.5)), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.child((x * self.gamma) ** 2) * self.gamma


STEPS = {
    "plain": (nullcontext, {}),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), {}),
    "checkpoint": (nullcontext, {"reentrant": False}),
    "reentrant": (nullcontext, {"reentrant": True}),
    "moved": (torch.autograd.graph.save_on_cpu, {}),
}
"""What a step runs in, with the arguments of the forward."""
EVERYWHERE = (*STEPS, "compiled", "measured")


def step(model: nn.Module, x: Tensor, around, options: dict) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the gradients of a step."""
    with around():
        loss = model(x, **options).float().square().mean()
    model.zero_grad()
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def off(ours: list[Tensor], exact: list[Tensor]) -> float:
    """Return the largest error of a gradient, relative to its length."""
    scale = max(b.norm().item() for b in exact)
    return max((a - b).norm().item() / (b.norm().item() + 1e-3 * scale) for a, b in zip(ours, exact, strict=True))


def compiled_step() -> float:
    """Return the largest error of a gradient of compiled layers."""
    from lightning_actprune import convert

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(8, 64)
    _, exact = step(model, x, nullcontext, {})
    convert(model, rules={kind: RULES[kind] for kind in ("type:linear", "type:norm", "type:activation")})
    return off(step(torch.compile(model, backend="aot_eager"), x, nullcontext, {})[1], exact)


def measured(model: nn.Module, x: Tensor) -> dict[str, str]:
    """Return what each measurement of a step says: that it is possible, or why it is not."""
    from lightning_actprune.analysis.first_batch import RecomputationProbe
    from lightning_actprune.analysis.memory import SavedTensorMeter
    from lightning_actprune.analysis.sensitivity import SensitivityProbe
    from lightning_actprune.analysis.sensitivity_grid import SensitivityGrid
    from lightning_actprune.analysis.step_memory import StepMemoryRecorder

    found = {}
    grid = SensitivityGrid((0.5,), (None,), 32)
    makers = {
        "SavedTensorMeter": lambda: SavedTensorMeter(model, x),
        "StepMemoryRecorder": lambda: StepMemoryRecorder(model, x),
        "SensitivityProbe": lambda: SensitivityProbe(model, grid),
        "RecomputationProbe": lambda: RecomputationProbe(model),
    }
    for name, make in makers.items():
        found[name] = opened = said(make, model, x)
        if not isinstance(opened, str):
            found[name] = ", ".join(getattr(opened, "recomputed", []))
        if isinstance(opened, SavedTensorMeter):
            report = opened.report()
            found["kept"] = report.dense_bytes, report.other_bytes + sum(row.stored_bytes for row in report.rows)
    return found


def said(make, model: nn.Module, x: Tensor):
    """Return the probe that a step was measured with, or why it could not be."""
    try:
        with make() as opened:
            model(x).sum().backward()
    except RuntimeError as error:
        return str(error)
    return opened


def everything(gone: list[str], where: list[str]) -> dict:
    """Return what becomes of a converted model in each of ``where`` if torch has not the names that are ``gone``."""
    asked = []

    def resolve(name: str):
        asked.append(name)
        if name in gone:
            raise AttributeError(name)
        return resolve_name(name)

    pkgutil.resolve_name = resolve
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from lightning_actprune import convert

        pkgutil.resolve_name = resolve_name
        torch.manual_seed(0)
        model, x = Model(), torch.randn(4, 128, SIZE)
        exact = {name: step(model, x, *STEPS[name]) for name in STEPS if name in where}
        report = convert(model, rules=RULES)
        errors, losses = {}, {}
        for name in exact:
            loss, grads = step(model, x, *STEPS[name])
            errors[name] = off(grads, exact[name][1])
            losses[name] = loss.item()
        if "compiled" in where:
            errors["compiled"] = compiled_step()
        found = measured(model, x) if "measured" in where else {}
    return {
        "asked": asked,
        "errors": errors,
        "losses": losses,
        "measured": found,
        "converted": len(report.converted),
        "warnings": sorted({str(w.message) for w in caught if "lightning_actprune" in str(w.message)}),
    }


def in_child(gone: list[str], where: list[str]) -> dict:
    """Return what ``everything`` does, of a child process."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = everything(gone, where)
        except BaseException as error:
            answer = {"error": repr(error)}
        with os.fdopen(writes, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return json.loads(answer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        gone, where = json.loads(line)
        print(json.dumps(in_child(gone, where)), flush=True)
