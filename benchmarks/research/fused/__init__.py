"""A backend that computes the base product itself, with LoRA inside; not installed, see docs/what-did-not-pay.md."""
