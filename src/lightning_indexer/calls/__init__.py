"""The public calls, one file an operation: validate once, select once, allocate once, run."""
