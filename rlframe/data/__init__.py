"""Episodes from anywhere: recorded by rlframe, or data sets of others."""
