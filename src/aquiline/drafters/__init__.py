"""Drafters: everything that fills a draft tree."""
