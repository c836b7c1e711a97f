"""One thread: on operands this small, threads that wait for each other cost more than they save."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)
