"""Several ranks that train together."""
