"""Batches of environments that speak NEXT_STEP autoreset, whatever is behind them."""
