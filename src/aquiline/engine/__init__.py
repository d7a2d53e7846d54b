"""What surrounds the loop: requests, batches, streams, chats and text."""
