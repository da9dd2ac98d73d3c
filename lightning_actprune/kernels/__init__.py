"""Triton kernels and their launch functions; nothing else in the package imports Triton.

Imported only when a kernel is about to run, so that importing the package costs nothing and touches no GPU. Rules
that hold in every file: values are upcast to fp32 right after the load (the interpreter computes bf16 wrongly, and GPUs
lose nothing); addresses are int64, block and row numbers int32; sizes that change the code are ``tl.constexpr``; no
autotune.
"""
