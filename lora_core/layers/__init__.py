"""Layers that carry adapters around the modules of a model."""
