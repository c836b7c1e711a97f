"""Writes docs/results/h200-*.json from the tables of the pages, whose runs kept no JSON.

A newer run replaces them: `lightning-indexer bench … --results docs/results`, see RELEASING.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
H200 = {"device": "NVIDIA H200", "arch": "sm90", "torch": "2.11", "cuda": "13.0"}


def table(page: str, header: str) -> list[list[str]]:
    """The body of the table of a page whose header begins so."""
    lines = (DOCS / page).read_text().splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith(header)) + 2
    body = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        body.append([cell.strip() for cell in line.strip("|").split("|")])
    return body


def scores() -> dict[str, object]:
    rows = []
    for window, h, m, n, *us, _tflops, host, theirs, _ratio, portable in table(
        "kernels/cuda_sm90.md", "| window | H | M | N |"
    ):
        case = {"window": window, "heads": int(h), "head_dim": 128, "s_q": int(m), "s_k": int(n)}
        for form, time in zip(("clean", "noclean", "compressed"), us, strict=True):
            rows.append({**case, "form": form, "contender": "cuda-sm90", "median_us": float(time)})
        rows[-1]["host_us"] = float(host)
        for name, time in (("deep_gemm", theirs), ("triton-portable", portable)):
            rows.append({**case, "form": "compressed", "contender": name, "median_us": float(time)})
    facts = {**H200, "vllm": "0.33", "commit": "d451d0d", "date": "2026-11-29"}
    ceilings = {"product": "fp8", "product_tflops": 1292.0, "copy_gbs": 4264.0}
    return {"environment": facts, "source": "docs/kernels/cuda_sm90.md", "ceilings": ceilings, "rows": rows}


def selection() -> dict[str, object]:
    rows = []
    names = ("cuda-sm90", "triton-portable", "torch.topk", "flashinfer", "sglang")
    for what, floor, *times, _ratio in table("kernels/top_k.md", "| rows | floor | cuda-sm90 |"):
        m, n, words = re.fullmatch(r"\((\d+), (\d+)\),? ?(.*)", what).groups()  # type: ignore[union-attr]
        k = re.search(r"k = (\d+)", words)
        window = "packed" if "packed" in words else "whole" if "whole" in words else "causal"
        for name, time in zip(names, times, strict=True):
            rows.append(
                {"rows": int(m), "width": int(n), "k": int(k[1]) if k else 2048, "window": window,
                 "ties": "ties" in words, "contender": name, "floor_us": float(floor), "median_us": float(time)}
            )  # fmt: skip
    facts = {**H200, "commit": "4736e82", "date": "2026-11-30"}
    return {"environment": facts, "source": "docs/kernels/top_k.md", "rows": rows}


if __name__ == "__main__":
    recorded = {"scores": scores(), "top_k": selection()}
    for name, document in ((f"h200-{name}", document) for name, document in recorded.items()):
        path = DOCS / "results" / f"{name}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{path.name}: {len(document['rows'])} rows")  # type: ignore[arg-type]
