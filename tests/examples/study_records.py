"""Made-up records of the accuracy study."""

ENVIRONMENT = {"gpu": "GPU", "torch": "2", "triton": "3", "command": "python made_up.py"}


def study_record(setting, seed, accuracy, **more):
    """Return the record of a run; `setting` is the method and, of pruned runs, sparsity, block size and format."""
    method, *values = setting
    record = {"task": "resmlp", "model": "net", "dataset": "images", "epochs": 2, "batches": 3, "batch": 4, "lr": 0.01}
    record |= {"precision": "bf16", "method": method, "seed": seed, "accuracy": accuracy, "final_loss": accuracy / 100}
    record |= dict(zip(("sparsity", "block_size", "value_format"), values or [None] * 3, strict=True))
    return {**record, "bits_per_value": 16.0, **ENVIRONMENT, **more}
