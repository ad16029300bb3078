"""Tests of evaluation, in this process and beside it, with films, and when a runner evaluates."""
