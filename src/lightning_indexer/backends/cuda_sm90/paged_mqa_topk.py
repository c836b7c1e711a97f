"""``fp8_paged_mqa_topk`` for Hopper: row waves; of calls of one wave, as those of decode, two launches and no more."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.backends import row_waves
from lightning_indexer.backends.cuda_sm90 import paged_mqa_logits, top_k
from lightning_indexer.cuda import nvrtc
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsCall
from lightning_indexer.problems.paged_mqa_topk import PagedMqaTopKCall, PagedMqaTopKProblem, row_ends
from lightning_indexer.problems.top_k import TopKCall


class PagedMqaTopK(row_waves.RowWaves):
    """The kernel of ``fp8_paged_mqa_topk`` that ``cuda-sm90`` registers."""

    def __init__(self) -> None:
        super().__init__(paged_mqa_logits.PagedMqaLogits(), [(top_k.TopK(), nvrtc.missing)])

    def launch(self, problem: PagedMqaTopKProblem, arch: Arch, config: row_waves.Waves) -> Launch:  # type: ignore[override]
        return Launch(self, problem, arch, config)


class Launch(row_waves.Launch):
    """Row waves of one problem."""

    def bind(self, call: PagedMqaTopKCall) -> Callable[[PagedMqaTopKCall], None]:
        bound = super().bind(call)
        one_wave = isinstance(bound, row_waves.OneWave) and not bound.forced
        return _TwoLaunches(self, call) if one_wave else bound


class _TwoLaunches:
    """A call of one wave whose operands lie in one layout, by the addresses of its operands: scores have no tensor."""

    def __init__(self, launch: Launch, call: PagedMqaTopKCall) -> None:
        problem = launch.problem
        self.device, self.bytes = call.q.get_device(), (launch.workspace_bytes,)
        self.lengths_are_ends = row_waves.lengths_are_ends(call)
        ((score, select, _),) = launch.parts.values()
        # Scores have strides before they have a place, of which no tensor is made.
        scores = torch.empty_strided((problem.rows, problem.width), (launch.stride, 1), device="meta")
        q, cache, weights, lengths, tables, layout, sequences, offsets, pages, indices, values, _ = call
        self.scoring: paged_mqa_logits.Bound = score.bind(
            PagedMqaLogitsCall(
                q, cache, weights, lengths, tables, problem.width, layout, sequences, False, torch.float32, scores
            )
        )
        self.selection: top_k.Bound = select.bind(TopKCall(scores, None, None, offsets, pages, indices, values))

    def __call__(self, call: PagedMqaTopKCall) -> None:
        device = self.device
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(call)
        q, cache, weights, lengths, tables, _, sequences, offsets, pages, indices, values, workspace = call
        if workspace is None:
            workspace = _empty_strided(self.bytes, (1,), dtype=_uint8, device=q.device)
        ends = None if self.lengths_are_ends else row_ends(lengths, q.shape[1]).contiguous()
        scores, at_lengths = workspace.data_ptr(), lengths.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(device)
        self.scoring.at(
            stream, q.data_ptr(), cache.data_ptr(), weights.data_ptr(), at_lengths, tables.data_ptr(),
            0 if sequences is None else sequences.data_ptr(), scores,
        )  # fmt: skip
        self.selection.at(
            stream, scores, 0, at_lengths if ends is None else ends.data_ptr(),
            0 if offsets is None else offsets.data_ptr(), 0 if pages is None else pages.data_ptr(),
            indices.data_ptr(), 0 if values is None else values.data_ptr(),
        )  # fmt: skip
        return None


# A global is found in less time than an attribute of a module.
_empty_strided, _uint8 = torch.empty_strided, torch.uint8
