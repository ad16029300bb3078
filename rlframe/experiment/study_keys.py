"""Keys of a launch that are no settings of a run: of a study, of a single run, and of the command line alone."""

SWEEP, ZIP, SEARCH = GRIDS = ("sweep.", "zip.", "search.")  # before a key of the runs
REPEATS = "repeats"
SEARCH_KEYS = ("n_runs", "searcher", "pruner", "metric")
PBT_KEYS = ("pbt.interval_steps", "pbt.quantile", "pbt.resample")
PLAN_KEYS = (REPEATS, *SEARCH_KEYS, *PBT_KEYS)  # what makes its runs
STUDY_KEYS = ("log_dir", "run_ID", "affinity", "retries", "stall_s", "seeds", "stack")  # one value for all runs
SINGLE_RUN_KEYS = ("tune_sampler", "resume")
COMMAND_LINE_KEYS = ("dry_run", "trust", "traceback")  # neither in a file nor in a study's record
