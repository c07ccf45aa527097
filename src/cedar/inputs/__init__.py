"""What comes into a model: tokens, the n-gram token map, images."""
