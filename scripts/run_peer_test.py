"""Runs another project's own test file against the adapter of its call, on any device.

    python scripts/run_peer_test.py aiter test_fp8_mqa_logits.py --device cpu -- -q
    PYTHONPATH=DeepGEMM python scripts/run_peer_test.py deep_gemm DeepGEMM/tests/test_attention.py -- -k mqa_logits

The file is fetched by whoever runs this. Of AITER nothing else is needed; of DeepGEMM its Python files, on the path,
for the helpers that its tests import.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lightning_indexer.arch import arch_of
from lightning_indexer.integrations import aiter, deep_gemm


def module(name: str, **contents: object) -> None:
    """Puts a module and its packages where ``import`` finds them first."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        found = sys.modules.setdefault(".".join(parts[:count]), ModuleType(".".join(parts[:count])))
        if count < len(parts):
            found.__path__ = []  # a package
    for key, value in contents.items():
        setattr(sys.modules[name], key, value)


def as_aiter(device: torch.device) -> None:
    """The modules that AITER's test imports."""
    fnuz = arch_of(device).fp8 == "fnuz"
    dtypes = (
        (torch.float8_e5m2fnuz, torch.float8_e4m3fnuz) if fnuz else (torch.float8_e5m2, torch.float8_e4m3fn)
    )  # fmt: skip
    module("aiter.ops.triton.attention.fp8_mqa_logits", fp8_mqa_logits=aiter.fp8_mqa_logits)
    module("aiter.ops.triton.utils.types", get_fp8_dtypes=lambda: dtypes)


def as_deep_gemm(device: torch.device) -> None:
    """``deep_gemm`` with this library's calls; ``deep_gemm.testing`` and ``deep_gemm.utils`` are DeepGEMM's own.

    Its timings, which look for the names of its kernels, are left out.
    """
    spec = importlib.machinery.PathFinder.find_spec("deep_gemm")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("DeepGEMM's Python files are not on the path: PYTHONPATH=DeepGEMM")
    package = ModuleType("deep_gemm")
    package.__path__ = list(spec.submodule_search_locations)
    for name in dir(deep_gemm):
        if not name.startswith("_"):
            setattr(package, name, getattr(deep_gemm, name))
    package.get_num_sms = lambda: torch.cuda.get_device_properties(device).multi_processor_count  # type: ignore[attr-defined]
    extension = ModuleType("deep_gemm._C")
    extension.__getattr__ = lambda name: None  # type: ignore[method-assign]
    sys.modules |= {"deep_gemm": package, "deep_gemm._C": extension}
    testing = importlib.import_module("deep_gemm.testing")
    testing.bench_kineto = lambda call, names, *rest, **more: 1.0 if isinstance(names, str) else (1.0,) * len(names)


def main() -> int:
    arguments = sys.argv[1:]
    others = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=["aiter", "deep_gemm"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    {"aiter": as_aiter, "deep_gemm": as_deep_gemm}[options.peer](torch.device(options.device))
    sys.path.insert(0, str(options.file.resolve().parent))  # of what it imports from beside it
    text = options.file.read_text()
    if options.device != "cuda":
        text = re.sub(r"""(["'])cuda\1""", repr(options.device), text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, options.file.name)
        path.write_text(text)
        return int(pytest.main(["-p", "no:cacheprovider", "--rootdir", folder, "-c", "/dev/null", *others, str(path)]))


if __name__ == "__main__":
    sys.exit(main())
