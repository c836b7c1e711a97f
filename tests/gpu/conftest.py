"""What every test of this folder needs: a GPU, and a backend that takes the problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_indexer import arch_of
from lightning_indexer.selection import registry


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests of this folder ``gpu``, and skips them without one."""
    item.add_marker(pytest.mark.gpu)
    no_gpu = not torch.cuda.is_available()
    item.add_marker(pytest.mark.skipif(no_gpu, reason="no GPU: kernels run in the interpreter instead"))


@pytest.fixture
def device() -> torch.device:
    """The current GPU."""
    return torch.device("cuda", torch.cuda.current_device())


def _gate(backend: str, problem: Any, device: torch.device) -> None:
    [verdict] = registry.explain(problem, arch_of(device), backend)
    if verdict.reason is not None:
        pytest.skip(verdict.reason)


@pytest.fixture
def gate() -> Callable[[str, Any, torch.device], None]:
    """``gate(backend, problem, device)`` skips the test with the reason why the backend refuses the problem."""
    return _gate
