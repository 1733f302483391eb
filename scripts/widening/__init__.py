"""Exact widening of Llama models: the parts behind scripts/widen_gguf.py."""
