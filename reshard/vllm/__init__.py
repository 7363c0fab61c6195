"""vLLM: learn its layouts from its own model classes, with no weights and, if need be, with no engine."""
