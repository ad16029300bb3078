"""How updates are made: steps of optimizers, numbers that follow schedules, and what makes them fast.

An algorithm's file has its equations; `optimizer_step` descends them, and `schedules` has the numbers in them now. The
rest changes no result: `compiled`, of what `recorded` has found, `graphed`, `stacked` for several seeds at once, and
`side_effects`, by which those tell what they cannot do.
"""
