"""A trained policy elsewhere: loaded from its files, as a function, exported."""
