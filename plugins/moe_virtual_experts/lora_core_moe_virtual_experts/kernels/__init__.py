"""Formula, kernel, launcher: one operation per module."""
