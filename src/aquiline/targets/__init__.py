"""Target models: our own Llama-family decoder, its fast CPU copy, and the adapter for others."""
