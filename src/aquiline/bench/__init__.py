"""Measuring: methods side by side on tasks, the papers' findings, and tuning for one's own prompts."""
