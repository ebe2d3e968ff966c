"""The expert backend "virtual_experts" of lora_core: Triton kernels over (slot, expert) groups."""

__version__ = "0.1.0"
