"""`lora-core new-backend`: a complete distribution that passes the suite before a line is written."""
