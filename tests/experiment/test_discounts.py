"""algo.discount=auto: by the time limit of the environment."""

import pytest

from rlframe.core.errors import ConfigError
from rlframe.experiment.discounts import discount_of
from rlframe.experiment.settings import from_flat, to_flat


def test_the_discount_is_that_of_a_fifth_of_the_longest_episode() -> None:
    assert [discount_of(n) for n in (20, 100, 200, 500, 1_000, 5_000)] == [0.95, 0.95, 0.975, 0.99, 0.995, 0.995]


@pytest.mark.parametrize(
    ("words", "discount"),
    [
        ({"env": "HalfCheetah-v5"}, 0.995),
        ({"env": "HalfCheetah-v5", "env.max_episode_steps": 500}, 0.99),
        ({"env": "Pendulum-v1", "env_kwargs.max_episode_steps": 400}, 0.9875),
    ],
)
def test_auto_becomes_a_number_that_is_saved(words: dict[str, object], discount: float) -> None:
    experiment = from_flat({"algo": "sac", "algo.discount": "auto", **words})
    assert experiment.algo.discount == discount
    assert experiment.sampler_config().discount == discount
    assert from_flat(to_flat(experiment)).algo.discount == discount


def test_auto_without_a_known_time_limit_is_refused() -> None:
    settings = {"algo": "sac", "algo.discount": "auto", "env": "rlframe.envs.debug_envs:Identity"}
    with pytest.raises(ConfigError, match=r"algo.discount=auto needs the time limit of env=rlframe.envs.debug_envs:Id"):
        from_flat(settings)
    with pytest.raises(ConfigError, match=r"algo.discount=1.5 must be from 0 to 1"):
        from_flat({"algo": "sac", "algo.discount": 1.5})
    with pytest.raises(ConfigError, match=r"algo.discount=linear.*neither a number nor auto"):
        from_flat({"algo": "sac", "algo.discount": "linear(0.9,0.99)"})
