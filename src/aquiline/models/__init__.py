"""Target files: resolves a name to a folder with weights."""
