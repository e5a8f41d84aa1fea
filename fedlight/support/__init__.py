"""Files, checks, words and seeds that every room uses."""
