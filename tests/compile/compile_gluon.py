"""Compiles ``gluon-gfx950`` without a device and prints what came out, as one JSON line a problem: rows, H, D, facts.

Run by test_gluon_compiled.py in a process of its own, because the other tests run Triton's interpreter.
"""

import dataclasses
import json
import sys

import torch

from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.backends.gluon_gfx950.config import heuristic
from lightning_indexer.backends.gluon_gfx950.mqa_logits import Launch
from lightning_indexer.backends.triton_launch import call_like

if __name__ == "__main__":
    arch = Arch.parse("gfx950")
    for rows, heads, head_dim, facts in json.loads(sys.argv[1]):
        wide = facts.pop("wide", False)
        if "out_dtype" in facts:
            facts["out_dtype"] = getattr(torch, facts["out_dtype"])
        problem = MqaLogitsProblem(rows, 32768, heads, head_dim, **facts)
        launch = Launch(problem, arch, heuristic(problem, arch), wide=wide)
        built = launch.build(launch.arguments(call_like(problem, arch)))
        facts = {"name": built.kernel, "text": built.isa, "planned": launch.config.lds_bytes(head_dim)}
        print(json.dumps({**facts, **dataclasses.asdict(built.resources)}), flush=True)
