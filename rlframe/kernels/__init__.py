"""How products are made fast: matrix products, precision and barriers of the compiler, and copies to a GPU."""
