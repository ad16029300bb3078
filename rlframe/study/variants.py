"""`rlframe.run_study`: a study from Python whose runs are trainings by `rlframe.launch`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlframe.core.errors import ConfigError
from rlframe.core.main_script import check_not_imported
from rlframe.core.parts import python_keys
from rlframe.experiment.job import check_words
from rlframe.experiment.study_keys import PLAN_KEYS, SEARCH, STUDY_KEYS, SWEEP
from rlframe.record.context import dated
from rlframe.study.objects import StudyObjects
from rlframe.study.overview import StudyOverview, read_study
from rlframe.study.plan import bare_key, setting_names
from rlframe.study.search import PBT
from rlframe.study.study import execute, words_of_variant
from rlframe.study.sweep import LAUNCH, plan_study
from rlframe.study.words import Experiments, is_name

_NAMED = {"env", "algo", "experiment"}  # without any of these, launch takes a preset, and rlframe.train does not


def train_variants(variants: Any, shared: Iterable[tuple[str, Any]], seeds: Any, search: Any) -> StudyOverview:
    """Train every variant with every seed, or search; see rlframe.run_study.

    Args:
        shared: settings of all variants, and those of the study: log_dir, affinity, retries, n_runs and so on.
    Raises:
        ConfigError: a setting is wrong, or `variants` and `seeds` are no lists; nothing was started.
    """
    check_not_imported("run_study")
    try:
        seeds, search = list(seeds), dict(search)
    except (TypeError, ValueError):
        raise ConfigError(
            f"seeds={seeds!r:.60} must be a list, such as range(3), and search={search!r:.60} a dict of what is drawn"
        ) from None
    if not isinstance(variants, Sequence) or not all(isinstance(each, Mapping) for each in variants):
        raise ConfigError(f"variants={variants!r:.60} must be a list of dicts, one for each variant")
    if wrong := [f"search={{{key!r}: {text!r:.60}}}" for key, text in search.items() if not isinstance(text, str)]:
        raise ConfigError(f"{wrong[0]} needs text such as 'uniform(LOW,HIGH)'")
    of_all, variants = _as_in_train(shared), [_as_in_train(variant.items()) for variant in variants]
    log_dir = str(of_all.get("log_dir", ""))
    objects = StudyObjects(Path(log_dir).expanduser().absolute() if log_dir else dated("study"))
    words = words_of_variant(of_all, LAUNCH, objects)
    own = [words_of_variant(variant, LAUNCH, objects) for variant in variants]
    given = {*map(bare_key, words), *search}
    own = [each if _NAMED & {*given, *each} else {"algo": "ppo", **each} for each in own]
    if objects:
        words["log_dir"] = str(objects.directory)
    experiments = _experiments(own, words, seeds, search)
    command = [f"{key}={text}" for key, text in words.items()]
    with objects.kept():
        study, slots, options = plan_study(command, experiments, check_words, trust=False)
        execute(replace(study, resume_hint=f"log_dir={study.directory} in the same call"), slots, options)
    return read_study(study.directory)


def _as_in_train(settings: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Settings as `rlframe.train` takes them."""
    given = python_keys(settings)
    if empty := [key for key, value in given.items() if value is None]:
        raise ConfigError(f"{empty[0]} has no value; leave it out for its default")
    return {key: str(value).lower() if isinstance(value, bool) else value for key, value in given.items()}


def _experiments(
    variants: Sequence[Mapping[str, str]], shared: Mapping[str, str], seeds: Sequence[int], search: Mapping[str, str]
) -> Experiments:
    """An experiment for each variant, as of a study in a file."""
    if not variants or not seeds:
        raise ConfigError(f"a study needs at least one variant and one seed, not {len(variants)} and {len(seeds)}")
    for key in (key for each in variants for key in each):
        if key in (*STUDY_KEYS, *PLAN_KEYS, "seed") or bare_key(key) != key:
            raise ConfigError(f"a variant sets {key:.60}, which is for the whole study; give it to run_study itself")
    for k, each in enumerate(variants):
        if each in variants[:k]:
            raise ConfigError(f"variants {variants.index(each)} and {k} are the same; remove one")
    every = {f"{SWEEP}seed": ",".join(map(str, seeds)), **{f"{SEARCH}{key}": text for key, text in search.items()}}
    if search and shared.get("searcher") == PBT:
        if len(seeds) > 1:
            raise ConfigError(
                f"seeds={seeds} is not for searcher={PBT}, whose members have seeds of their own, from one on; use "
                f"seeds=[{seeds[0]}]"
            )
        every = {"seed": every.pop(f"{SWEEP}seed"), **every}
    common = {key for key in variants[0] if all(each.get(key) == variants[0][key] for each in variants)}
    changed = [{key: text for key, text in each.items() if key not in common} for each in variants]
    names = [name if is_name(name) else f"variant_{k}" for k, name in enumerate(setting_names(changed))]
    if len(variants) == 1:
        names = [""]
    return {name: {**shared, **each, **every} for name, each in zip(names, variants, strict=True)}
