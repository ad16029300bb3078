"""A trained policy outside training: loaded from a run directory, called on observations, exported."""
