"""How products are made fast: matrix products, layers, convolutions, optimizers and copies to a GPU."""
