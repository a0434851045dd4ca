"""Kernels for KV cache reuse: each with a plain reference and faster versions of it.

An operation is a package: `reference.py` says what it computes, in plain torch; `triton.py` is for
CUDA; `cpu.py` is there where another way pays on a CPU. The package's own function checks its
arguments and chooses: CUDA tensors go to Triton, all others to the CPU. Triton is imported when the
first CUDA tensor comes.

    rotate         turn keys from one position to another, or from before rotation
    key_deviation  how far keys are from others
    diff_extract   which blocks of a mirror differ from its master
    diff_apply     write a mirror's blocks over its master's
    fused_restore  one layer of a mirror, from master and patch into paged memory

`restore_pipeline` runs the last one layer after layer, each layer's copy beside the restore of the
one before.
"""
