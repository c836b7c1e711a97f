"""Launches compiled AMD kernels: on a GPU through HIP, or in the simulator, behind one interface."""

from lightning_indexer.launcher.arguments import pack_arguments
from lightning_indexer.launcher.base import Launcher, launcher_for, simulates
from lightning_indexer.launcher.simulator import simulation

__all__ = ["Launcher", "launcher_for", "pack_arguments", "simulates", "simulation"]
