"""EAGLE heads on disk, in every dialect."""
