"""Benchmarks of all methods side by side, and tuning on a user's prompts."""
