"""Adapter files: PEFT folders to per-site A and B."""
