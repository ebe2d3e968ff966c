"""The backend `grouped_mm` for lora_core."""
