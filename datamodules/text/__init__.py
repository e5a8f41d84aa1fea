"""Templates, tokens and encoded examples."""
