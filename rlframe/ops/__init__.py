"""Pure tensor functions over [T, B], each with its equation and source."""
