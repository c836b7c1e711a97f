"""One file an operation: the frozen facts of a call, every check of its arguments, and the float32 reference."""
