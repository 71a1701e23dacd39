"""Compiled kernels, each with a plain reference beside it. `cpu` holds C++ built on first use."""
