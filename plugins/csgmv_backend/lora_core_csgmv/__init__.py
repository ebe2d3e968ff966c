"""Chunked-segment LoRA kernels for lora_core: `lora_core.load_backend("csgmv")`."""
