"""Requests, batches, streams, chats and text, around the decoding loop."""
