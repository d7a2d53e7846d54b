"""Serving a target with its head."""
