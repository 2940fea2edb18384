"""What the mechanisms of one engine share."""
