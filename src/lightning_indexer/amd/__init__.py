"""Launches compiled AMD kernels: on a GPU through HIP, or in the simulator, behind one interface."""

from lightning_indexer.amd.arguments import pack_arguments
from lightning_indexer.amd.launcher import Launcher, launcher_for, simulates
from lightning_indexer.amd.simulated import simulation

__all__ = ["Launcher", "launcher_for", "pack_arguments", "simulates", "simulation"]
