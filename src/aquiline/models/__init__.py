"""Target files: from what a user names to a folder with weights."""
