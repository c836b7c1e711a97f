"""One thread: on operands this small, threads that wait for each other cost more than they save."""

import pytest
import torch

import interpreter
from lightning_indexer import envs


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter():
    if envs.triton_interprets():
        interpreter.speed_up()
