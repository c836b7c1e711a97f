"""Set-up that has to come before the first import of Triton, and what keeps tests apart from each other."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Without a GPU, triton-portable runs in Triton's interpreter; Triton reads the variable once, at import.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _isolated(monkeypatch):
    """None of the library's variables from outside, and nothing that another test's selection left in the caches."""
    from lightning_indexer import api, arch, envs

    for variable in envs.KNOWN:
        monkeypatch.delenv(variable, raising=False)
    api.forget_plans()
    arch._cuda_arch.cache_clear()
    yield
    api.forget_plans()
    arch._cuda_arch.cache_clear()
