"""Reading and writing what lives on disk: targets, draft heads, and the dialects they come in."""
