"""Times of launches on AMD GPUs: executed instructions replayed through a model of a compute unit."""

from cdna_sim.timing import pictures
from cdna_sim.timing.device import DEVICES, Device
from cdna_sim.timing.grid import Prediction, Sample, Traces, predict, record, timeline
from cdna_sim.timing.unit import CAUSES, Run, replay

__all__ = [
    "CAUSES",
    "DEVICES",
    "Device",
    "Prediction",
    "Run",
    "Sample",
    "Traces",
    "pictures",
    "predict",
    "record",
    "replay",
    "timeline",
]
