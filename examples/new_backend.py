"""A backend from outside: a gate, a launch, and one call that registers it. See docs/adding-a-backend.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import lightning_indexer
from lightning_indexer import Arch, MqaLogitsProblem, explain, fp8_mqa_logits, quantize_k, quantize_q, reference_logits
from lightning_indexer.problems.mqa_logits import MqaLogitsCall


class Config(NamedTuple):
    rows: int  # of one product; a compiled kernel has its tile here


class MqaLogits:
    def supports(self, problem: MqaLogitsProblem, arch: Arch) -> str | None:
        return None if problem.clean_logits and not problem.compressed else "clean logits only"

    def config(self, problem: MqaLogitsProblem, arch: Arch) -> Config:
        return Config(rows=16)

    def neighbours(self, problem: MqaLogitsProblem, arch: Arch) -> list[Config]:
        return [self.config(problem, arch), Config(rows=64)]

    def launch(self, problem: MqaLogitsProblem, arch: Arch, config: Config) -> Callable[[MqaLogitsCall], None]:
        def run(call: MqaLogitsCall) -> None:
            k, position = call.k.float(), torch.arange(problem.keys)
            for first in range(0, problem.rows, config.rows):
                rows = slice(first, first + config.rows)
                scores = (call.q[rows].float() @ k.t()).relu()
                seen = (position >= call.ks[rows, None]) & (position < call.ke[rows, None])
                logits = (call.weights[rows, None, :] @ scores)[:, 0] * call.kv_scale  # which may be negative
                call.result[rows] = logits.masked_fill(~seen, float("-inf"))

        return run


class RowByRow:
    name, summary = "row-by-row", "an example"
    kernels = {"fp8_mqa_logits": MqaLogits()}  # noqa: RUF012

    def missing(self) -> str | None:
        return None


def main() -> None:
    lightning_indexer.register(RowByRow(), ahead_of="torch-blocked", archs=["cpu"])
    print(*explain(MqaLogitsProblem(40, 100, 8, 32), "cpu"), sep="\n")
    q, kv = quantize_q(torch.randn(40, 8, 32)), quantize_k(torch.randn(100, 32))
    windows = torch.zeros(40, dtype=torch.int32), torch.arange(61, 101).int()
    operands = (q, kv, torch.rand(40, 8), *windows)
    torch.testing.assert_close(fp8_mqa_logits(*operands), reference_logits(*operands), rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
