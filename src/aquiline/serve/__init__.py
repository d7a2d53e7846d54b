"""Serving: many requests at once, here or in the engines that outgrow one machine."""
