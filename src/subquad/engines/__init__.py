"""The engines: pure functions that handle chunking, masks, precision and state."""
