"""Trainers of transformers and TRL with their callback, and a loop of accelerate after ``convert``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import Keep, convert, revert
from lightning_actprune.analysis.first_forwards import FirstForwards
from lightning_actprune.operators.base import CompressedLayer

try:
    import accelerate
    import transformers
except ImportError:  # foreign tests are collected where they are not run
    accelerate = transformers = None

pytestmark = pytest.mark.foreign

VOCABULARY, LENGTH = 64, 128


def make_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **(sizes | changes))
    return transformers.LlamaForCausalLM(config)


def make_data(count: int = 32) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


class Rows(torch.utils.data.Dataset[Any]):
    """Raises at the row ``fails_at``."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.rows, self.fails_at = make_data(), fails_at

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if row == self.fails_at:
            raise RuntimeError("a row that fails")
        return self.rows[row]


def make_trainer(model: Any, folder: Path, *callbacks: Any, data: Any = None, **options: Any) -> Any:
    settings = {"max_steps": 4, "logging_steps": 1, "save_strategy": "no"} | options
    silent = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_num_workers": 0}
    args = transformers.TrainingArguments(str(folder), per_device_train_batch_size=4, **silent, **settings)
    data = data or Rows()
    return transformers.Trainer(model, args, train_dataset=data, eval_dataset=make_data(4), callbacks=list(callbacks))


def make_callback(*args: Any, **options: Any) -> Any:
    from lightning_actprune.integrations.transformers import ActivationPruningCallback

    return ActivationPruningCallback(*args, **options)


def losses(trainer: Any) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def is_dense(model: nn.Module) -> bool:
    return not any(isinstance(module, CompressedLayer) for module in model.modules())


def test_a_training_with_checkpoints_and_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = make_trainer(make_model(), tmp_path / "dense")
    dense.train()
    model, callback = make_model(), make_callback("max")
    often = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(model, tmp_path / "ours", callback, **often)
    trainer.train()
    assert is_dense(model)
    assert losses(trainer)[0] == losses(dense)[0]
    assert losses(trainer) == pytest.approx(losses(dense), rel=1e-3)
    memory = callback.memory
    assert 0 < memory.stored_bytes < 0.4 * memory.dense_bytes
    (logged,) = {
        log["actprune_stored_mib"] for log in trainer.state.log_history if log.get("step") == 4 and "loss" in log
    }
    assert math.isclose(logged, memory.stored_bytes / 2**20, abs_tol=0.01)
    assert f"{memory.stored_bytes / 2**20:.2f} MiB" in capsys.readouterr().out

    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-4")
    assert saved.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))
    resumed = make_trainer(make_model(), tmp_path / "resumed", make_callback("max", verbose=False))
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert losses(resumed)[-2:] == losses(trainer)[-2:]


def test_a_compiled_training(tmp_path: Path) -> None:
    dense = make_trainer(make_model(), tmp_path, max_steps=2)
    dense.train()
    model, callback = make_model(), make_callback("max", verbose=False)
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    trainer = make_trainer(model, tmp_path, callback, max_steps=2, **compiled)
    trainer.train()
    assert losses(trainer) == pytest.approx(losses(dense), rel=1e-3)
    assert sum(row.stored_bytes for row in callback.compiled) < 0.5 * sum(row.dense_bytes for row in callback.compiled)
    assert is_dense(model)


def test_after_an_error_the_next_training_begins_anew(tmp_path: Path) -> None:
    model, callback = make_model(), make_callback("balanced", verbose=False)
    with pytest.raises(RuntimeError, match="a row that fails"):
        make_trainer(model, tmp_path, callback, data=Rows(fails_at=9), num_train_epochs=1, max_steps=-1).train()
    assert not is_dense(model)  # nobody told the callback
    trainer = make_trainer(model, tmp_path, callback, max_steps=2)
    trainer.train()
    assert is_dense(model)
    assert callback.memory is not None
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 0
    revert(model)


def test_what_cannot_help_is_said(tmp_path: Path) -> None:
    model = make_model()
    trainer = make_trainer(model, tmp_path, make_callback(rules={"nowhere": None}, verbose=False))
    with pytest.raises(ValueError, match="nowhere"):
        trainer.train()
    assert is_dense(model)
    callback = make_callback(verbose=False)
    with pytest.warns(UserWarning, match="gradient_checkpointing=False"):
        make_trainer(model, tmp_path, callback, gradient_checkpointing=True, max_steps=1).train()


def test_a_layer_whose_input_is_kept_anyway_is_dense_from_the_second_step_on(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            hidden = self.layers[0](nn.functional.one_hot(input_ids, VOCABULARY).float()).sin()
            return {"loss": (self.layers[1](hidden).exp() * hidden.exp()).mean() + hidden.square().mean()}

    callback = make_callback(rules={"layers.*": Keep(bits=4), "type:activation": None}, verbose=False)
    make_trainer(Net(), tmp_path, callback, max_steps=2).train()
    assert [layer.fqn for layer in callback.report.converted] == ["layers.0"]
    (kept,) = callback.report.skipped
    assert "kept" in kept.reason


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_of_accelerate(compiled: bool) -> None:
    def train(preset: Any) -> list[float]:
        model = make_model()
        if preset is not None:
            watches.append(FirstForwards(model, convert(model, preset)))
        accelerator = accelerate.Accelerator(cpu=True, dynamo_backend="aot_eager" if compiled else "no")
        prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        found = []
        for row in make_data(3):
            loss = prepared(**{name: value[None] for name, value in row.items()}).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    watches: list[FirstForwards] = []
    dense, ours = train(None), train("max")
    assert compiled or watches[0].memory is not None
    assert ours[0] == pytest.approx(dense[0], rel=1e-6)
    assert ours == pytest.approx(dense, rel=1e-3)


@pytest.fixture
def quantized_model(tmp_path: Path) -> Iterator[Any]:
    """A model whose linear layers, but for the head, are bitsandbytes' of 4 bits."""
    pytest.importorskip("bitsandbytes")
    make_model(hidden_size=128, intermediate_size=256).save_pretrained(tmp_path / "whole")
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "whole", quantization_config=how, device_map="cpu", dtype=torch.float32
        )


def test_adapters_on_four_bits_in_a_trainer_of_trl(quantized_model: Any, tmp_path: Path) -> None:
    trl, peft, datasets = (pytest.importorskip(name) for name in ("trl", "peft", "datasets"))
    rows = [row["input_ids"].tolist() for row in make_data(16)]
    callback = make_callback("balanced", verbose=False)
    args = trl.SFTConfig(
        str(tmp_path), max_steps=2, per_device_train_batch_size=8, gradient_checkpointing=False, report_to=[],
        use_cpu=True, bf16=False, logging_steps=1, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0")
    ends = {"eos_token": "1", "pad_token": "1"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), **ends)
    lora = peft.LoraConfig(r=4, target_modules="all-linear")
    trainer = trl.SFTTrainer(
        quantized_model, args, train_dataset=datasets.Dataset.from_dict({"input_ids": rows}), peft_config=lora,
        callbacks=[callback], processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    assert is_dense(trainer.model)
    assert callback.memory.stored_bytes < 0.4 * callback.memory.dense_bytes
    frozen = [layer for layer in callback.report.layers if layer.kind == "Linear4bit"]
    assert len(frozen) == 14
    assert not any(row.fqn.endswith("base_layer") for row in callback.memory.rows)  # they keep nothing
