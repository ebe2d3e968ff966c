"""lora-core-triton: the `triton` backend of lora_core. Importing this imports nothing else."""
