"""Where there is no decoder (Python 3.10), what reads code objects is tested, and nothing is run."""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):
    collect_ignore_glob = ["test_semantics_*.py", "test_mfma.py"]
