"""Parts of the benchmarks: the contenders, and how they are measured."""
