"""Fine-tune a language model of transformers with LoRA (peft) and compressed activations.

    pip install transformers peft
    python examples/lora.py

The model is a small GPT-2 built from a configuration, so nothing is downloaded, and the text is the Python source of
the standard library, byte by byte. Its frozen weights are random, so it learns little: in your program the base comes
from `AutoModelForCausalLM.from_pretrained`, and the data from your tokenizer.
"""

from __future__ import annotations

import argparse as some_source
from pathlib import Path

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning

LENGTH = 128
"""Bytes in a sample."""


class LanguageModel(L.LightningModule):
    """Predict the next byte of a text."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


def make_model() -> nn.Module:
    """Return a model with frozen weights and trained updates of low rank."""
    tokens = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    base = GPT2LMHeadModel(GPT2Config(n_positions=LENGTH, n_embd=64, n_layer=3, n_head=2, **tokens))
    lora = LoraConfig(r=8, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return get_peft_model(base, lora)


def make_data(samples: int = 320) -> torch.Tensor:
    """Return samples of source text, `[samples, LENGTH]`."""
    text = Path(some_source.__file__).read_bytes()
    return torch.tensor(list(text[: samples * LENGTH])).view(samples, LENGTH)


def main(max_steps: int = 40) -> tuple[nn.Module, L.Trainer]:
    """Train and return the model and the Trainer."""
    L.seed_everything(0, verbose=False)
    model = make_model()
    model.print_trainable_parameters()
    trainer = L.Trainer(
        max_steps=max_steps,
        callbacks=[ActivationPruning("max"), ActivationMemoryMonitor()],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(LanguageModel(model), DataLoader(make_data(), batch_size=8, shuffle=True))
    print(f"Loss of the last batch: {trainer.callback_metrics['train_loss']:.2f}; a guess among 256 bytes has 5.55.")
    return model, trainer


if __name__ == "__main__":
    torch.set_num_threads(1)  # this model is too small for more
    main()
