"""Drop-in replacements for the indexer calls of other projects: the same names, the same argument order.

Each adapter reorders its arguments and calls :func:`lightning_indexer.fp8_mqa_logits`; none imports the project that it
mirrors. ``deep_gemm`` has the calls of DeepGEMM, ``aiter`` those of AITER and of vLLM on ROCm, ``flashinfer`` its fused
scoring and selection.
"""
