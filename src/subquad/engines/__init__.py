"""The engines: pure functions that own speed, masks, chunking, precision and state."""
