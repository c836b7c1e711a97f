"""How much memory a device has left, before work that may not fit."""

from __future__ import annotations

from pathlib import Path

import torch


def available_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 * 2**30  # no /proc: assume a small machine


def no_room(needed: int, device: torch.device) -> str | None:
    """None, or the sentence that says why ``needed`` bytes cannot be had on the device."""
    free = available_bytes(device)
    if needed > free:
        return f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
    return None
