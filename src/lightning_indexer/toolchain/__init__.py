"""Run-time compilers, and their cache on disk."""
