"""One file for each operator: maths, plain-torch form, autograd and module classes."""
