"""The nouns everybody shares: trees of arrays, samples, spaces, schedules, seeds, config fields."""
