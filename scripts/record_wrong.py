"""Prints `verify --json` of a backend with a planted fault, for docs/results/wrong.json and the picture of it.

The fault: the second tile of 16 rows is computed with the windows of the first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import lightning_indexer
from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.cli.app import app
from lightning_indexer.problems.mqa_logits import MqaLogitsCall

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from new_backend import Config, MqaLogits, RowByRow

COMMAND = ("verify", "--device", "cpu", "--operation", "fp8_mqa_logits", "--backend", "row-by-row", "--heads", "32")


class Faulty(MqaLogits):
    def launch(self, problem: MqaLogitsProblem, arch: Arch, config: Config) -> Callable[[MqaLogitsCall], None]:
        right = super().launch(problem, arch, config)

        def run(call: MqaLogitsCall) -> None:
            ks, ke = call.ks.clone(), call.ke.clone()
            second = ks[16:32].shape[0]
            ks[16:32], ke[16:32] = ks[:second], ke[:second]
            right(call._replace(ks=ks, ke=ke))

        return run


if __name__ == "__main__":
    faulty = RowByRow()
    faulty.kernels = {"fp8_mqa_logits": Faulty()}
    lightning_indexer.register(faulty, ahead_of="torch-blocked", archs=["cpu"])
    app([*COMMAND, "--head-dim", "128", "--window", "causal", "--case", "(61, 160)", "--case", "(64, 384)", "--json"])
