"""Renews the served head from served conversations: store, training slices, gate, versions."""
