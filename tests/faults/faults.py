"""Mistakes that could be made in the package, as data, each with the tests that reach the place.

The files that are most likely to catch a fault come first, then folders, for trees in which files have other names.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault.

    Args:
        name: A short name.
        kind: What goes wrong.
        module: The file with the fault, below ``lightning_actprune``.
        old: A text that occurs in it once.
        new: What is there in its place.
        listed: Test files and folders below ``tests`` in the order in which they run, separated by blanks.
        whole: Whether `run.py --whole` tries it with the whole default command.
    """

    name: str
    kind: str
    module: str
    old: str
    new: str
    listed: str
    whole: bool = False

    @property
    def file(self) -> str:
        """The file with the fault."""
        return f"lightning_actprune/{self.module}"

    @property
    def tests(self) -> list[str]:
        """The test files and folders."""
        return [f"tests/{path}" for path in self.listed.split()]


# fmt: off
FAULTS = [
    # === Codec: blocks, formats, casts, what is shared ===============================================================
    Fault("keep_count_floor", "rounding the wrong way: one block too few is kept", "codec/blocks.py",
          "return blocks - blocks * parts // SPARSITY_PARTS",
          "return blocks + -blocks * parts // SPARSITY_PARTS",
          "codec/test_blocks.py codec contract operators"),
    Fault("ties_last", "ties are broken the other way", "codec/blocks.py",
          "order = keys.sort(dim=1, descending=True, stable=True).indices",
          "order = keys.sort(dim=1, stable=True).indices.flip(1)",
          "codec/test_blocks.py codec kernels/test_pack.py kernels contract"),
    Fault("nan_dropped", "a block with NaN has the smallest key, and is dropped", "codec/blocks.py",
          'nan_to_num(nan=float("inf"), posinf=float("inf"))',
          'nan_to_num(nan=0.0, posinf=float("inf"))',
          "codec/test_blocks.py codec contract kernels/test_pack.py kernels"),
    Fault("batch_competes", "selection per batch rather than per sample", "codec/blocks.py",
          "rows = x.reshape(x.shape[0] if x.dim() == 2 else 1, 1, x.shape[-1])",
          "rows = x.reshape(1, -1, x.shape[-1])",
          "codec/test_blocks.py operators/test_scopes.py operators/test_linear.py codec operators", whole=True),
    Fault("unpack_in_fp32", "unpacked in another type than was asked for", "codec/blocks.py",
          "values = formats.dequantize(values, block_size, bits, dtype)",
          "values = formats.dequantize(values, block_size, bits, torch.float32)",
          "codec/test_packed.py codec/test_formats.py codec contract operators"),
    Fault("scale_bit", "the scale has one bit more than its header", "codec/formats.py",
          "& -(2**20)",
          "& -(2**19)",
          "codec/test_formats.py codec kernels/test_formats.py kernels contract"),
    Fault("dither_constant", "equal blocks get equal random numbers", "codec/formats.py",
          "torch.arange(first, first + len(headers), device=headers.device)",
          "torch.zeros(len(headers), dtype=torch.int64, device=headers.device)",
          "codec/test_formats.py codec kernels/test_formats.py kernels contract"),
    Fault("stale_pack", "a version check is skipped: a pack from before a write is shared", "codec/pack_cache.py",
          "return x._version, place_of(x), view, *settings",
          "return 0, place_of(x), view, *settings",
          "codec/test_sharing.py codec operators/test_linear.py operators contract", whole=True),
    Fault("fp64_cast", "autocast rounds fp64, too", "codec/dispatch.py",
          "return x if x.dtype == torch.float64 else as_dtype(x, dtype)",
          "return as_dtype(x, dtype)",
          "codec/test_dispatch.py operators/test_linear.py codec contract operators", whole=True),
    # === Kernels: tails, ties, strides, counters =====================================================================
    Fault("cast_strides", "a wrong stride rule: the cast copy is read with the strides of the input", "kernels/pack.py",
          "gathered = (rows * length, length) if casts else strides",
          "gathered = strides",
          "kernels/test_pack.py operators/test_linear.py kernels contract"),
    Fault("gather_tail", "the tail of a short last block has a value of the next row", "kernels/pack.py",
          "x = tl.load(x_ptr + start[:, None] + column, mask=stored & (column < length), other=0.0)",
          "x = tl.load(x_ptr + start[:, None] + column, mask=stored & (column <= length), other=0.0)",
          "kernels/test_pack.py kernels contract"),
    Fault("gradient_tail", "the last kept row of a column counts twice", "kernels/linear.py",
          "stored = (p + k < high)[:, None] & (e < B)[None, :]",
          "stored = (p + k <= high)[:, None] & (e < B)[None, :]",
          "kernels/test_linear.py operators/test_weight_grad.py kernels contract"),
    Fault("bias_row", "the bias gradient misses the last row", "kernels/sums.py",
          "last = tl.minimum(first + share, rows)",
          "last = tl.minimum(first + share, rows - 1)",
          "kernels/test_sums.py operators/test_linear.py kernels contract"),
    Fault("counter_left", "missing synchronisation: a counter is not reset for the next launch", "kernels/sums.py",
          "            tl.store(out_ptr + o, total.to(out_ptr.dtype.element_ty), mask=o < outputs)\n"
          "            tl.store(counter, 0)\n",
          "            tl.store(out_ptr + o, total.to(out_ptr.dtype.element_ty), mask=o < outputs)\n",
          "kernels/test_sums.py operators/test_linear.py kernels contract"),
    Fault("relu_zero", "the mask of a fused ReLU is inverted for 0", "kernels/channel_norm.py",
          "higher = (y.to(y_ptr.dtype.element_ty).to(tl.float32) <= 0.0) == 0",
          "higher = (y.to(y_ptr.dtype.element_ty).to(tl.float32) < 0.0) == 0",
          "operators/test_norm.py kernels/test_norm.py kernels contract"),
    # === Operators ===================================================================================================
    Fault("block_size_ignored", "the block size of a call is ignored", "operators/linear.py",
          "Blocks(keep.block_size, topk_over, keep.stored_bits, selection)",
          "Blocks(Keep.block_size, topk_over, keep.stored_bits, selection)",
          "operators/test_weight_grad.py operators/test_linear.py codec/test_packed.py contract operators"),
    Fault("turned_rows", "gradients of attention meet the rows of another sample", "operators/linear.py",
          "rows = _as_rows(grad_output.transpose(0, 1)) if is_turned else grad_rows",
          "rows = grad_rows",
          "operators/test_attention.py operators contract"),
    Fault("query_twice", "attention keeps the query twice", "operators/attention.py",
          "return turned_key if query is key else query.transpose(0, 1), turned_key, turned_value",
          "return query.transpose(0, 1), turned_key, turned_value",
          "operators/test_attention.py operators contract"),
    Fault("group_size", "means of a group are over all channels", "operators/channel_norm.py",
          "/ max(size * length, 1)",
          "/ max(channels * length, 1)",
          "operators/test_norm.py kernels/test_norm.py contract operators"),
    Fault("dropout_scale", "dropout scales gradients by the other probability", "operators/activation.py",
          "StoredMask(1 / (1 - p))",
          "StoredMask(1 / p)",
          "operators/test_activation.py contract operators"),
    Fault("gated_swapped", "the derivatives of gate and factor are swapped", "operators/gated.py",
          "for factor, needed in ((q, stored.for_a), (p, stored.for_u)) if needed",
          "for factor, needed in ((p, stored.for_u), (q, stored.for_a)) if needed",
          "operators/test_activation.py kernels/test_activation.py contract operators"),
    Fault("cache_of_linear", "a cache hit for another key: that of a linear layer", "operators/convolution.py",
          '("convolution", *settings, forced_backend()),',
          "(*settings, forced_backend()),",
          "operators/test_linear.py codec/test_sharing.py contract operators"),
    Fault("generator_moved", "a generator is not restored after a second run", "operators/second_run.py",
          "stack.callback(set_python_generators, python_generators())",
          "pass",
          "operators/test_recompute.py operators callbacks/test_first_batch.py contract"),
    Fault("weight_packed", "a weight with a mask is packed as an activation is", "operators/saved.py",
          "return tuple(sorted(shaped.shape)) in shapes or _copies_parameter(tensor)",
          "return _copies_parameter(tensor)",
          "operators/test_saved.py operators/test_sites.py contract/test_saved.py operators contract"),
    Fault("written_to", "a tensor that was written to before backward is no error", "operators/regions.py",
          "if value._version != self._version:",
          "if value._version < self._version:",
          "operators/test_saved.py contract/test_saved.py operators contract"),
    Fault("mask_lost", "a mask is lost behind a sum, and scores with it are packed", "codec/saved_ops.py",
          '"add", "sub", "neg", inputs=_U.NOTHING, kind=_K.KEEPS_OUTLIERS | _SMOOTH',
          '"add", "sub", "neg", inputs=_U.NOTHING, kind=_SMOOTH',
          "operators/test_sites.py operators/test_saved.py operators contract"),
    Fault("bias_on_each_rank", "tensor parallel: every process adds the whole bias", "operators/tensor_parallel.py",
          "return Placements(Partial(), of_x, of_weight, whole, divides_bias=True)",
          "return Placements(Partial(), of_x, of_weight, whole)",
          "operators/test_tensor_parallel.py operators"),
    # === Conversion ==================================================================================================
    Fault("hooks_left", "hooks on what operations save are not removed", "convert.py",
          "attached.pop(name).detach()",
          "attached.pop(name)",
          "test_convert.py operators/test_saved.py contract/test_saved.py contract operators callbacks"),
    Fault("class_left", "reverting leaves the class of attention modules", "convert.py",
          "if type(module) is RoutedMultiheadAttention and not isinstance(module.out_proj, CompressedLinear):",
          "if type(module) is RoutedMultiheadAttention and isinstance(module.out_proj, CompressedLinear):",
          "test_convert.py operators/test_attention.py operators contract", whole=True),
    Fault("left_converted", "a model is as it was only after success", "convert.py",
          "        revert(model, owner)\n        raise\n",
          "        raise\n",
          "test_convert.py test_config.py operators contract"),
    # === Callbacks ===================================================================================================
    Fault("schedule_early", "a schedule is off by one step", "callbacks/progress.py",
          "progress = min(trainer.global_step / self._horizon, 1.0)",
          "progress = min((trainer.global_step + 1) / self._horizon, 1.0)",
          "callbacks/test_pruning.py "
          "test_training.py callbacks", whole=True),
    Fault("state_field", "the state of a checkpoint misses a field", "callbacks/pruning.py",
          '            "retained": self._decisions.retained,\n',
          "",
          "callbacks/test_checkpoints.py callbacks/test_first_batch.py callbacks"),
    Fault("no_warning", "a warning is never given: two optimizers count twice", "callbacks/fit.py",
          "if horizon is not None and total_steps is None and count > 1:",
          "if horizon is not None and total_steps is None and count > 2:",
          "callbacks/test_pruning.py callbacks"),
    # === Compiled code ===============================================================================================
    Fault("sign_of_nan", "NaN is hidden: its sign is that of a negative number", "compiled/signs.py",
          "torch.nn.functional.pad(~(x <= 0), (0,",
          "torch.nn.functional.pad(x > 0, (0,",
          "compiled/test_inductor.py compiled"),
    Fault("fewest_bits", "compiled: the reader that asks for the fewest bits counts", "compiled/readers.py",
          "most = max(ways, key=lambda way: way.bits)",
          "most = min(ways, key=lambda way: way.bits)",
          "compiled/test_joint.py compiled/test_pieces.py compiled test_compile.py"),
    Fault("key_as_value", "compiled: keys are kept in the bits of values, and values in those of keys",
          "codec/saved_ops.py",
          "        Use.KEY: policy.key,\n        Use.VALUE: policy.value,\n",
          "        Use.KEY: policy.value,\n        Use.VALUE: policy.key,\n",
          "compiled/test_joint.py compiled"),
    # === Replays =====================================================================================================
    Fault("moved_weights", "a graph is replayed whose weights have moved", "replay/watch.py",
          "            and self._places == list(map(_place, self.tensors))\n",
          "",
          "test_replay.py callbacks/test_cuda_graphs.py"),
    Fault("same_masks", "random numbers go on from where the captures of a graph have left them", "replay/capture.py",
          "        set_python_generators(python)\n        _set_generators(generators)\n",
          "        set_python_generators(python)\n",
          "test_replay.py callbacks/test_cuda_graphs.py"),
    Fault("overwritten", "what backward needs is overwritten by the next call", "replay/graph.py",
          "        if self._pending is not None and self._pending() is not None:\n            return True\n",
          "",
          "test_replay.py callbacks/test_cuda_graphs.py"),
    Fault("stale_casts", "casts of weights stay those of the capture", "replay/call.py",
          "enabled, cache_enabled=False)",
          "enabled)",
          "test_replay.py callbacks/test_cuda_graphs.py"),
    # === Analysis ====================================================================================================
    Fault("counted_twice", "the monitor counts shared storages twice", "analysis/memory.py",
          "        self._seen.add(saved.key)\n",
          "",
          "analysis/test_memory.py analysis callbacks/test_memory.py"),
    Fault("copy_of_gradients", "an estimate is off by one copy of the gradients", "analysis/simulate_step.py",
          "if not self._in_lightning and not self._accumulates:",
          "if not self._accumulates:",
          "analysis/test_estimate.py analysis/test_allocation.py analysis callbacks/test_budget.py"),
    Fault("budget_term", "a budget is counted without what a measured step has shown", "analysis/allocation.py",
          "budget * (self.step(len(self.path) - 1).peak_bytes + off)",
          "budget * self.step(len(self.path) - 1).peak_bytes",
          "analysis/test_allocation.py callbacks/test_budget.py analysis"),
    Fault("freed_in_full", "an input that several layers read is freed by each of them", "analysis/first_batch.py",
          "return sum(call.dense_bytes / share for call, share in shares.items()",
          "return sum(call.dense_bytes for call, share in shares.items()",
          "analysis/test_retention.py analysis callbacks/test_first_batch.py"),
    Fault("ranks_apart", "ranks do not agree on which layers drop nothing", "callbacks/first_batch.py",
          "            energy.add_up(partial(sum_over_ranks, trainer))\n",
          "",
          "callbacks/test_ranks.py callbacks"),
]
# fmt: on
