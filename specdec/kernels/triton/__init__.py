"""Triton kernels: choice, tree walk, residual draw and KV commit. Imported by the CUDA backend and by tests only.

Each equals its reference in `specdec.kernels.reference` or `specdec.verifier`, ids included: noise is the same Philox,
scores are float64. They run on the CPU where TRITON_INTERPRET=1 was set before triton was imported.
"""
