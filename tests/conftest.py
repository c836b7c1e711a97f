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
    from lightning_indexer import arch, envs
    from lightning_indexer.calls import common

    for variable in envs.KNOWN:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest's workers have one
    common.forget_plans()
    arch._cuda_arch.cache_clear()
    yield
    common.forget_plans()
    arch._cuda_arch.cache_clear()


@pytest.fixture(scope="session")
def _kernel_cache(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # that of all workers: what one compiles the others load
    folder = base / "kernels"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture
def compiled_kernels(_isolated, _kernel_cache, monkeypatch):
    """A cache of compiled kernels that the tests of a session share."""
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(_kernel_cache))
    return _kernel_cache
