"""Draft heads in the layouts of other engines."""
