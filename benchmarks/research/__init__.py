"""Kernel forms tried on the way to the backends; see docs/what-did-not-pay.md."""
