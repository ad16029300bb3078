"""Action distributions, chosen from the action space."""
