"""Drafters: the methods that propose draft trees."""
