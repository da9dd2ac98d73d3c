"""Operators with schema, autograd, dispatch and a plain-PyTorch reference; no modules, no Lightning."""
