"""Types that all packages share: trees of arrays, samples, spaces, schedules, seeds, config fields."""
