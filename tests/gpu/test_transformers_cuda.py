"""transformers' indexers on a GPU, by the kernels that calls take there."""

from __future__ import annotations

import pytest

from indexers_of_transformers import MODELS, side_by_side


@pytest.mark.parametrize("kind", MODELS)
def test_published_dimensions(kind, device):
    side_by_side(kind, device, prefill=3000, total=3331, k=256 if kind == "deepseek_v4" else 1024)
