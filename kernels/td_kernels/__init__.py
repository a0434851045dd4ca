"""Kernels for KV cache reuse: each with a plain reference and faster versions of it."""
