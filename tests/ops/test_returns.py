"""Returns by hand on episodes that terminate, truncate, lose lives and meet the batch's end, and against slow loops."""

import functools
import math

import pytest
import torch
from torch import Tensor

from rlframe.ops import returns
from rlframe.ops.returns import (
    discounted_return,
    generalized_advantage,
    lambda_return,
    n_step_return,
    q_lambda_return,
    v_trace,
)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]  # [T, 1]


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)[:, None]  # [T, 1]


def near(actual: Tensor, expected: Tensor, atol: float = 1e-6) -> bool:
    return torch.allclose(actual, expected.to(actual.dtype), rtol=0, atol=atol)


# One column each: two steps and the end's row, then the next episode begins and the batch ends in it.
REWARD = column(1, 2, 0, 3)
VALUE = column(10, 20, 40, 80, 160)
NEVER = flags(0, 0, 0, 0)
AT_1 = flags(0, 1, 0, 0)
EVERY = flags(1, 1, 1, 1)
BUT_2 = flags(1, 1, 0, 1)


class TestGeneralizedAdvantage:
    """γ = 0.5, λ = 0.5, so a trace of 0.25."""

    def advantage(self, terminated: Tensor, truncated: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        return generalized_advantage(REWARD, VALUE, terminated, truncated, valid, 0.5, 0.5)

    def test_batch_end_bootstraps_from_row_T(self) -> None:
        advantage, return_ = self.advantage(NEVER, NEVER, EVERY)
        # δ = 1 + 10 - 10, 2 + 20 - 20, 0 + 40 - 40, 3 + 80 - 80 = 1, 2, 0, 3
        assert near(advantage, column(1 + 0.25 * 2.1875, 2 + 0.25 * 0.75, 0 + 0.25 * 3, 3))
        assert near(return_, column(11.546875, 22.1875, 40.75, 83))

    def test_termination_does_not_bootstrap(self) -> None:
        advantage, return_ = self.advantage(AT_1, NEVER, BUT_2)
        # δ = 1, 2 - 20, -, 3
        assert near(advantage, column(1 + 0.25 * -18, -18, 0, 3))
        assert near(return_, column(6.5, 2, 0, 83))

    def test_truncation_bootstraps_from_last_observation(self) -> None:
        advantage, return_ = self.advantage(NEVER, AT_1, BUT_2)
        # δ = 1, 2 + 0.5 * 40 - 20, -, 3
        assert near(advantage, column(1 + 0.25 * 2, 2, 0, 3))
        assert near(return_, column(11.5, 22, 0, 83))

    def test_lost_life_cuts_and_the_valid_row_after_it_counts(self) -> None:
        advantage, _ = self.advantage(AT_1, NEVER, EVERY)
        assert near(advantage, column(1 + 0.25 * -18, -18, 0.75, 3))

    def test_truncation_on_the_last_row_bootstraps_from_row_T(self) -> None:
        advantage, _ = self.advantage(NEVER, flags(0, 0, 0, 1), EVERY)
        assert near(advantage[-1], torch.tensor([3 + 0.5 * 160 - 80]))

    def test_termination_on_the_last_row_does_not_bootstrap(self) -> None:
        advantage, _ = self.advantage(flags(0, 0, 0, 1), NEVER, EVERY)
        assert near(advantage[-1], torch.tensor([3 - 80.0]))

    def test_one_row(self) -> None:
        advantage, _ = generalized_advantage(column(1), column(2, 4), flags(0), flags(0), flags(1), 0.5, 0.5)
        assert near(advantage, column(1))


class TestDiscountedReturn:
    def test_termination_truncation_and_batch_end(self) -> None:
        # 1 + 0.5 * 2, 2, -, 3 + 0.5 * 160
        assert near(discounted_return(REWARD, VALUE, AT_1, NEVER, BUT_2, 0.5), column(2, 2, 0, 83))
        # 1 + 0.5 * 22, 2 + 0.5 * 40, -, 83
        assert near(discounted_return(REWARD, VALUE, NEVER, AT_1, BUT_2, 0.5), column(12, 22, 0, 83))

    def test_zero_value_leaves_the_rewards(self) -> None:
        zeros = torch.zeros_like(VALUE)
        # 3, 0 + 1.5, 2 + 0.75, 1 + 1.375
        assert near(discounted_return(REWARD, zeros, NEVER, NEVER, EVERY, 0.5), column(2.375, 2.75, 1.5, 3))


class TestNStepReturn:
    """γ = 0.5, n = 2 unless said."""

    def test_batch_end_sums_the_rewards_available(self) -> None:
        return_, bootstrap, index = n_step_return(REWARD, NEVER, NEVER, EVERY, 0.5, 2)
        assert near(return_, column(2, 2, 1.5, 3))
        assert near(bootstrap, column(0.25, 0.25, 0.25, 0.5))
        assert index[:, 0].tolist() == [2, 3, 4, 4]

    def test_termination_stops_the_sum_and_the_bootstrap(self) -> None:
        return_, bootstrap, _ = n_step_return(REWARD, AT_1, NEVER, BUT_2, 0.5, 2)
        assert near(return_, column(2, 2, 0, 3))
        assert near(bootstrap, column(0, 0, 0, 0.5))

    def test_truncation_bootstraps_from_last_observation_with_the_steps_taken(self) -> None:
        return_, bootstrap, index = n_step_return(REWARD, NEVER, AT_1, BUT_2, 0.5, 3)
        assert near(return_, column(2, 2, 0, 3))
        assert near(bootstrap, column(0.25, 0.5, 0, 0.5))
        assert index[:, 0].tolist() == [2, 2, 2, 4]

    def test_lost_life_stops_the_sum(self) -> None:
        return_, bootstrap, index = n_step_return(REWARD, AT_1, NEVER, EVERY, 0.5, 3)
        assert near(return_, column(2, 2, 1.5, 3))
        assert near(bootstrap, column(0, 0, 0.25, 0.5))
        assert index[2:, 0].tolist() == [4, 4]

    def test_one_step_is_the_reward(self) -> None:
        return_, bootstrap, index = n_step_return(REWARD, NEVER, NEVER, EVERY, 0.5, 1)
        assert torch.equal(return_, REWARD)
        assert near(bootstrap, column(0.5, 0.5, 0.5, 0.5))
        assert index[:, 0].tolist() == [1, 2, 3, 4]

    def test_n_below_one_raises_an_error(self) -> None:
        with pytest.raises(ValueError, match="n=0"):
            n_step_return(REWARD, NEVER, NEVER, EVERY, 0.5, 0)


class TestVTrace:
    def test_by_hand_with_clipping(self) -> None:
        log_rho = torch.log(column(4, 0.5, 7, 1))
        vs, advantage = v_trace(log_rho, REWARD, VALUE, NEVER, AT_1, BUT_2, 0.5, rho_clip=2.0, c_clip=1.0)
        # ρ = 2, 0.5, -, 1; c = 1, 0.5, -, 1; δ = 1, 2, -, 3; vs - V = 2 + 0.5 * 1, 1, -, 3
        assert near(vs, column(12.5, 21, 0, 83))
        # 2 (1 + 0.5 * 21 - 10), 0.5 (2 + 0.5 * 40 - 20), -, 1 (3 + 0.5 * 160 - 80)
        assert near(advantage, column(3, 1, 0, 3))

    def test_termination_neither_bootstraps_nor_traces(self) -> None:
        vs, advantage = v_trace(torch.zeros(4, 1), REWARD, VALUE, AT_1, NEVER, EVERY, 0.5)
        # δ = 1, -18, 0, 3; vs - V = 1 - 9, -18, 1.5, 3
        assert near(vs, column(2, 2, 41.5, 83))
        assert near(advantage, column(1 + 0.5 * 2 - 10, -18, 0.5 * 83 - 40, 3))

    def test_lambda_shortens_the_trace(self) -> None:
        log_rho = torch.tensor([2.0, 0.5, 1.0, 1.0]).log()[:, None]
        vs, _ = v_trace(log_rho, REWARD, VALUE, NEVER, AT_1, BUT_2, 0.5, rho_clip=2.0, c_clip=1.0, lambda_=0.5)
        # δ = 1, 2, -, 3; vs - V = 2 + 0.5 * 0.5 * 1, 1, -, 3
        assert near(vs, column(12.25, 21, 0, 83))

    def test_ratio_on_a_row_that_is_not_valid_may_be_anything(self) -> None:
        log_rho = column(0, 0, math.nan, 0)
        vs, advantage = v_trace(log_rho, REWARD, VALUE, AT_1, NEVER, BUT_2, 0.5)
        assert vs.isfinite().all()
        assert advantage.isfinite().all()
        assert vs[2] == advantage[2] == 0

    def test_c_clip_above_rho_clip_raises_an_error(self) -> None:
        with pytest.raises(ValueError, match="rho_clip"):
            v_trace(torch.zeros(4, 1), REWARD, VALUE, NEVER, NEVER, EVERY, 0.5, rho_clip=0.5, c_clip=1.0)


# Random data in the sampler's convention, and references that walk one episode at a time in plain Python.

Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # reward, value, terminated, truncated, valid


def random_rows(seed: int, T: int = 37, B: int = 5) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    terminated, truncated = torch.zeros(T, B, dtype=torch.bool), torch.zeros(T, B, dtype=torch.bool)
    valid = torch.ones(T, B, dtype=torch.bool)
    valid[0, 0] = False  # the end of an episode of the batch before
    draw = torch.rand(T, B, generator=generator)
    for b in range(B):
        for t in range(T):
            if not valid[t, b]:
                continue
            lost_life = bool(draw[t, b] < 0.1)
            terminated[t, b] = bool(draw[t, b] < 0.2)
            truncated[t, b] = bool(0.15 < draw[t, b] < 0.3)
            if (terminated[t, b] or truncated[t, b]) and not lost_life and t + 1 < T:
                valid[t + 1, b] = False
    reward = torch.randn(T, B, generator=generator, dtype=torch.float64) * valid
    return reward, torch.randn(T + 1, B, generator=generator, dtype=torch.float64), terminated, truncated, valid


def stretches(rows: Rows, b: int) -> list[tuple[int, int]]:
    """(start, stop) of each stretch of rows that belongs together: up to an end, a row not valid, or T."""
    _, _, terminated, truncated, valid = rows
    found, t, T = [], 0, len(valid)
    while t < T:
        start = t
        while t < T and valid[t, b]:
            t += 1
            if terminated[t - 1, b] or truncated[t - 1, b]:
                break
        if t > start:
            found.append((start, t))
        else:
            t += 1
    return found


def slow_n_step(rows: Rows, discount: float, n: int) -> Tensor:
    """target[t], summed reward by reward."""
    reward, value, terminated, _, _ = rows
    target = torch.zeros_like(reward)
    for b in range(reward.shape[1]):
        for start, stop in stretches(rows, b):
            for t in range(start, stop):
                last = min(t + n, stop)
                total = sum(discount ** (i - t) * float(reward[i, b]) for i in range(t, last))
                if not terminated[last - 1, b]:
                    total += discount ** (last - t) * float(value[last, b])
                target[t, b] = total
    return target


@functools.cache
def slow_n_steps(seed: int) -> list[Tensor]:
    """The n-step returns of random rows, n = 1 ... T, discounted by 0.9."""
    rows = random_rows(seed)
    return [slow_n_step(rows, 0.9, n) for n in range(1, len(rows[0]) + 1)]


def slow_lambda_return(seed: int, lambda_: float) -> Tensor:
    """The textbook's mixture of n-step returns: (1-λ) Σ λ^(n-1) G_n, the rest of the weight on the longest."""
    by_n, valid = slow_n_steps(seed), random_rows(seed)[4]
    T = len(by_n)
    mixture = sum((1 - lambda_) * lambda_**n * target for n, target in enumerate(by_n))
    return (mixture + lambda_**T * by_n[-1]) * valid  # beyond a stretch's length the n-step returns are all the same


def slow_v_trace(rows: Rows, log_rho: Tensor, discount: float, rho_clip: float, c_clip: float) -> Tensor:
    """vs as the paper's double sum, equation 1."""
    reward, value, terminated, _, _ = rows
    vs = torch.zeros_like(reward)
    for b in range(reward.shape[1]):
        for start, stop in stretches(rows, b):
            for t in range(start, stop):
                total, product = float(value[t, b]), 1.0
                for i in range(t, stop):
                    ratio = math.exp(float(log_rho[i, b]))
                    after = 0.0 if terminated[i, b] else float(value[i + 1, b])
                    delta = min(rho_clip, ratio) * (float(reward[i, b]) + discount * after - float(value[i, b]))
                    total += discount ** (i - t) * product * delta
                    product *= min(c_clip, ratio)
                vs[t, b] = total
    return vs


def test_the_q_lambda_return_follows_the_best_action_and_ends_as_others_do() -> None:
    other = column(0, 20, -math.inf, 3, -1)  # of a second action, no better
    q = torch.stack([other, VALUE], -1)  # [5, 1, 2]
    never = q_lambda_return(REWARD, q, NEVER, NEVER, EVERY, 0.5, 0.5)
    # 3 + 80;  0 + (40 * 2 + 83) / 4;  2 + (20 * 2 + 40.75) / 4;  1 + (10 * 2 + 22.1875) / 4
    assert near(never, column(11.546875, 22.1875, 40.75, 83))
    assert near(q_lambda_return(REWARD, q, AT_1, NEVER, BUT_2, 0.5, 0.5), column(6.5, 2, 0, 83))
    assert near(q_lambda_return(REWARD, q, NEVER, AT_1, BUT_2, 0.5, 0.5), column(11.5, 22, 0, 83))
    assert near(q_lambda_return(REWARD, q, NEVER, NEVER, EVERY, 0.5, 0.0), column(11, 22, 40, 83))


@pytest.mark.parametrize("seed", range(3))
class TestAgainstSlowReference:
    def test_random_rows_contain_every_kind_of_end(self, seed: int) -> None:
        _, _, terminated, truncated, valid = random_rows(seed)
        assert (terminated & ~truncated).any()
        assert (truncated & ~terminated).any()
        assert (terminated & truncated).any()
        assert (terminated[:-1] & valid[1:]).any()
        assert (~valid[0]).any()
        assert (~valid[1:]).any()

    @pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
    def test_lambda_return(self, seed: int, lambda_: float) -> None:
        rows = random_rows(seed)
        assert near(lambda_return(*rows, 0.9, lambda_), slow_lambda_return(seed, lambda_), atol=1e-10)

    @pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
    def test_generalized_advantage(self, seed: int, lambda_: float) -> None:
        rows = random_rows(seed)
        advantage, return_ = generalized_advantage(*rows, 0.9, lambda_)
        expected = slow_lambda_return(seed, lambda_)
        assert near(return_, expected, atol=1e-10)
        assert near(advantage, (expected - rows[1][:-1]) * rows[4], atol=1e-10)

    def test_discounted_return(self, seed: int) -> None:
        rows = random_rows(seed)
        assert near(discounted_return(*rows, 0.9), slow_n_step(rows, 0.9, n=1000), atol=1e-10)

    @pytest.mark.parametrize("n", [1, 2, 5, 100])
    def test_n_step_return(self, seed: int, n: int) -> None:
        rows = random_rows(seed)
        reward, value, terminated, truncated, valid = rows
        return_, bootstrap, index = n_step_return(reward, terminated, truncated, valid, 0.9, n)
        target = return_ + bootstrap * value.gather(0, index)
        assert near(target, slow_n_step(rows, 0.9, n), atol=1e-10)

    def test_v_trace(self, seed: int) -> None:
        rows = random_rows(seed)
        log_rho = torch.randn(rows[0].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        vs, _ = v_trace(log_rho, *rows, 0.9, rho_clip=1.5, c_clip=1.0)
        assert near(vs, slow_v_trace(rows, log_rho, 0.9, 1.5, 1.0), atol=1e-10)

    def test_torch_and_numpy_accumulate_alike(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x, decay = torch.randn(37, 5, generator=generator), torch.rand(37, 5, generator=generator)
        in_torch = x.clone()
        returns._double(in_torch, decay)
        assert near(returns._accumulate(x.clone(), decay), in_torch)


class TestIdentities:
    rows = random_rows(7)

    def test_on_policy_v_trace_with_lambda_is_the_lambda_return(self) -> None:
        vs, _ = v_trace(torch.zeros_like(self.rows[0]), *self.rows, 0.9, lambda_=0.7)
        assert near(vs, lambda_return(*self.rows, 0.9, 0.7), atol=1e-10)

    def test_on_policy_v_trace_is_the_monte_carlo_return(self) -> None:
        vs, advantage = v_trace(torch.zeros_like(self.rows[0]), *self.rows, 0.9)
        assert near(vs, discounted_return(*self.rows, 0.9), atol=1e-10)
        assert near(advantage, generalized_advantage(*self.rows, 0.9, 1.0)[0], atol=1e-10)

    def test_zero_discount_leaves_the_reward(self) -> None:
        assert near(lambda_return(*self.rows, 0.0, 0.5), self.rows[0])


class TestContract:
    def test_inputs_are_not_changed(self) -> None:
        rows = random_rows(1)
        copies = [x.clone() for x in rows]
        generalized_advantage(*rows, 0.9, 0.9)
        v_trace(torch.zeros_like(rows[0]), *rows, 0.9)
        n_step_return(rows[0], *rows[2:], 0.9, 3)
        assert all(torch.equal(x, copy) for x, copy in zip(rows, copies, strict=True))

    def test_no_gradient_flows(self) -> None:
        value = VALUE.clone().requires_grad_()
        advantage, return_ = generalized_advantage(REWARD, value, NEVER, NEVER, EVERY, 0.9, 0.9)
        assert not advantage.requires_grad
        assert not return_.requires_grad

    def test_float32_stays_float32(self) -> None:
        advantage, return_ = generalized_advantage(REWARD, VALUE, NEVER, NEVER, EVERY, 0.9, 0.9)
        assert advantage.dtype == return_.dtype == torch.float32

    def test_value_without_the_bootstrap_row_raises_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"value must have shape \(5, 1\), got \(4, 1\)"):
            generalized_advantage(REWARD, VALUE[:-1], NEVER, NEVER, EVERY, 0.9, 0.9)

    def test_numeric_masks_raise_an_error(self) -> None:
        with pytest.raises(ValueError, match="terminated must be bool"):
            generalized_advantage(REWARD, VALUE, NEVER.float(), NEVER, EVERY, 0.9, 0.9)

    def test_discount_above_one_raises_an_error(self) -> None:
        with pytest.raises(ValueError, match=r"discount=1.5 must lie in \[0, 1\]"):
            generalized_advantage(REWARD, VALUE, NEVER, NEVER, EVERY, 1.5, 0.9)

    def test_reward_without_columns_raises_an_error(self) -> None:
        with pytest.raises(ValueError, match="reward must be"):
            n_step_return(REWARD[:, 0], NEVER, NEVER, EVERY, 0.9, 1)

    @pytest.mark.gpu
    def test_a_gpu_gives_the_same(self) -> None:
        rows = random_rows(3)
        on_gpu = tuple(x.cuda() for x in rows)
        for here, there in zip(
            generalized_advantage(*rows, 0.9, 0.9), generalized_advantage(*on_gpu, 0.9, 0.9), strict=True
        ):
            assert near(there.cpu(), here, atol=1e-10)
