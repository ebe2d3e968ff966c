"""A backend that computes the base product itself, with LoRA inside: `load_backend("fused")`."""
