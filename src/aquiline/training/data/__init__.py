"""Turns conversations into training sets."""
