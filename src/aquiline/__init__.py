"""Lossless speculative decoding: the same words, sooner."""
