"""Triton kernels and their launch functions; nothing else in the package imports Triton.

They are imported only when a kernel is about to run, so importing the package costs nothing and touches no GPU.

Names in all files: a tensor is ``[S, T, L]``, samples of rows of values, or ``[R, L]``. A row has ``columns`` blocks of
``B`` values; the last one may be shorter. ``BLOCK`` is ``B`` rounded up to a power of two. A stored block has a *place*
in the values, which hold ``nnz`` (or ``count``) blocks, or their bytes if ``FORMAT`` says so
(``formats.encode_format``; 0: unchanged values). Strides are in units of ``UNIT`` values (``places.stride_unit``).

Rules in all files: values are upcast to fp32 right after the load (the interpreter computes bf16 wrongly, and GPUs lose
nothing); addresses are int64, numbers of blocks and rows int32; sizes that change the code are ``tl.constexpr``; no
autotune.
"""
