"""A prompt of random embeddings with needles planted: tokens that hold a content, and later tokens that ask for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_indexer.e2e.stack import Layer

# RMS of a needle's content and of its answer, beside noise of RMS 1.
CONTENT, ANSWER = 3.0, 2.0
# The last tokens of the prompt, among which the questions are.
TAIL = 64
_BLOCK = 8192


@dataclass(frozen=True, slots=True)
class Needle:
    """``question`` is the position that asks, ``key`` the one that answers; key < question."""

    question: int
    key: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """``embeddings`` [context, hidden], the needles, and the ``answers`` [needles, hidden] that their keys hold."""

    embeddings: torch.Tensor
    needles: tuple[Needle, ...]
    answers: torch.Tensor


def make_prompt(context: int, hidden: int, needles: int, device: torch.device, dtype: torch.dtype, seed: int) -> Prompt:
    """Noise, and needles at evenly spread depths, each asked for once in the last tokens.

    Raises:
        ValueError: the context is too short for that many needles.
    """
    tail = min(TAIL, context // 4)
    if needles < 1 or needles > tail:
        raise ValueError(f"needles: got {needles}, expected 1 to {tail} in a context of {context} tokens")
    generator = torch.Generator(device=device).manual_seed(seed)
    embeddings = torch.empty(context, hidden, device=device, dtype=dtype)
    for start in range(0, context, _BLOCK):
        part = embeddings[start : start + _BLOCK]
        part.copy_(torch.randn(part.shape, device=device, generator=generator))
    contents, answers = torch.randn(2, needles, hidden, device=device, generator=generator).to(dtype).unbind()
    depth = context - tail
    planted = tuple(
        Needle(depth + index * tail // needles + tail // needles - 1, (2 * index + 1) * depth // (2 * needles))
        for index in range(needles)
    )
    for index, needle in enumerate(planted):
        embeddings[needle.key] += CONTENT * contents[index] + ANSWER * answers[index]
        # A question is the content with its channels rolled by half: see the docstring of ``stack``.
        embeddings[needle.question] += CONTENT * contents[index].roll(hidden // 2)
    return Prompt(embeddings, planted, answers)


def readout(layer: Layer, answers: torch.Tensor) -> torch.Tensor:
    """What a layer's attention gives a row that attends to one answer alone, up to its length: [needles, hidden]."""
    latent = answers @ layer.w_kv
    return torch.einsum("nl,hlv->nhv", latent, layer.w_uv).flatten(1) @ layer.w_o
