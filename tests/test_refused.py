"""Words of the command line that are refused, each with the message that names the remedy."""

from pathlib import Path

import pytest

from rlframe.launch import main

REFUSED = """
algo=pppo -> did you mean ppo
algo.learning_rte=1 -> did you mean algo.learning_rate?
algo=sac algo.learn_from=5 -> unknown key algo.learn_from; did you mean algo.learning_starts?
swep.seed=0,1 -> unknown key swep.seed; did you mean sweep.seed?
steps=1e5 -> did you mean runner.n_steps
total_steps=1e5 -> did you mean runner.n_steps
max_timesteps=1e5 -> did you mean runner.n_steps
eval.steps=100 -> did you mean eval.env_steps?
resum=runs/run_0 -> unknown key resum; did you mean resume
runner.n_steps=abc -> 'abc' is not a number
runner.n_steps=1.5 -> not a whole number
runner.n_steps=1.5M -> '1.5M' is not a number; write 1_500_000
runner.max_time_s=2h -> '2h' is not a number; write 7_200
runner.max_time_s=2m -> '2m' is not a number
env=CartPol-v1 -> did you mean CartPole-v1
experiment=classic/ppo_cartpol -> did you mean classic/ppo_cartpole
env=CartPole-v1 algo.minibatches=7 -> use one of 1, 2, 4, 8
env=CartPole-v1 model.memory=gru algo.minibatches=3 -> algo.minibatches=3 must divide the 16 sequences
env=CartPole-v1 env_kwargs.fooo=3 -> env_kwargs.fooo
model.memory=lst -> did you mean lstm
model.encoder=nature -> needs images
sampler=cpuu -> rlframe.samplers
runner=minibatch -> minibatch_rl
seed=-1 -> seed=-1 must be at least 0
sampler.batch_T=0 -> sampler.batch_T=0
sampler.batch_B=-1 -> sampler.batch_B=-1
sampler.decorrelation_steps=-1 -> sampler.decorrelation_steps=-1
algo.discount=1.5 -> discount=1.5 must be from 0 to 1
algo.gae_lambda=-0.1 -> gae_lambda=-0.1 must be from 0 to 1
algo=pg algo.discount=nan -> discount=nan must be from 0 to 1
model.hidden=[64,0] -> model.hidden=[64, 0]
model.memory_size=0 -> model.memory_size=0
model.log_std=nan -> model.log_std=nan
snapshot_mode=gap -> snapshot_gap
snapshot_keep=0 -> snapshot_keep=0 must be at least 1
snapshot_errors=continue world_size=2 runner=sync_rl -> snapshot_errors=continue needs world_size=1
foo -> key=value
seed=1 seed=2 -> set twice
device=cuda:99 -> GPUs are visible
log_dir=/proc/nowhere -> use another log_dir
resume=/nowhere -> name a run directory
resume=/nowhere experiment=classic/ppo_cartpole -> experiment=classic/ppo_cartpole is not for resume=/nowhere
resume=s3://bucket/run_0 dry_run=true -> a dry run fetches nothing
traceback=yes -> traceback='yes' must be true or false
dry_run=maybe -> true or false
algo=./nothere.py -> does not exist
algo=dqn algo.n_step=256 -> algo.n_step=256 must be from 1 to 255
algo.lr=1 -> did you mean algo.learning_rate?
algo=sac algo.gama=0.9 -> did you mean algo.discount?
algo=sac algo.alpha=0.2 -> did you mean algo.temperature?
algo.alpha=0.2 -> it is for algo=ddpg, dqn, maddpg, r2d1, td3 or td3_bc, not ppo
algo.replay.size=1 -> unknown key algo.replay.size; algo.replay is for algo=bc, cql,
model.encoder=natur -> did you mean nature?
runner.n_steps=1,000,000 -> '1,000,000' is not a number; write 1_000_000
runner=async_rl algo=impala sampler.device=gpu dry_run=true -> sampler.device='gpu' is not a device
runner.n_samplers=4 -> it is for runner=async_rl, not minibatch_rl_eval
sampler.wait_s=0.1 -> it is for sampler=gpu, not cpu
algo=dqn explore.temperature=1 -> it is for algo.explore=boltzmann, not epsilon
algo=dqn explore=boltzmann explore.epsilon=1 -> it is for algo.explore=epsilon, noise_hold or noisy, not boltzmann
algo.optimizer.momentum=0.9 -> it is for algo.optimizer=muon, rmsprop or sgd, not adam
reward.bonus.scale=1 -> it is for reward.bonus=icm or rnd
optimizer.momentum=0.9 -> did you mean algo.optimizer.momentum?
algo=td3 algo.policy_delay=3 -> did you mean algo.policy_interval?
env.length=3 -> an argument of the environment is env_kwargs.length
env=./nothere.py:Env -> env=./nothere.py:Env: nothere.py does not exist
env.wrappers=gymnasium.wrappers:FrameStackObservation -> needs more than an environment; give its other arguments
env.normalize_reward=yes -> env.normalize_reward=yes: write true or false
experiment=nothere.yaml -> experiment=nothere.yaml: no such file
callbacks=[foo] dry_run=true -> callbacks=foo must be written package.module:name
sweep.seed=0,1 callbacks=[foo] -> callbacks=foo must be written package.module:name
sweep.seed=0,1 sampler.statistics=[foo] -> sampler.statistics=foo must be written package.module:name
sweep.seed=0,1 agents.map=foo -> agents.map=foo must be written package.module:name
sweep.seed=0,1 device=gpu -> device='gpu' is not a device
sweep.seed=0,1 eval.function=foo:bar -> No module named 'foo'
experiment=./nothere.yaml -> experiment=./nothere.yaml: no such file
sampler.n_workers=-2 -> sampler.n_workers=-2 must be at least 0
search.algo.clip=uniform(0.1,0.3) seed=abc -> seed='abc' must be a whole number
learning_rate=1 -> did you mean algo.learning_rate?
n_steps=100 -> did you mean runner.n_steps?
n_step=100 -> did you mean runner.n_steps?
n_envs=4 -> did you mean sampler.batch_B or eval.n_envs?
algo=dqn algo.buffer_size=3 -> did you mean algo.replay.size?
run_dir=x algo=ppo -> did you mean log_dir?
env=PongNoFrameskip-v4 -> gives raw frames, 210x160 pixels in colour; use env=ALE/Pong-v5
env=ale_py:PongNoFrameskip-v4 -> gives raw frames, 210x160 pixels in colour; use env=ALE/Pong-v5
env=CartPole-v1 model.distribution=gaussian -> model.distribution is for Box actions
snapshot_gap=100 -> snapshot_mode=gap and snapshot_gap=N env_steps need each other
eval.env_steps=200 eval.n_episodes=0 -> eval.env_steps=200 plays episodes, and eval.n_episodes=0 none
eval.function=os.path:join runner=minibatch_rl -> eval.function=os.path:join would do nothing: runner=minibatch_rl
eval.opponents=[random] eval.n_episodes=0 -> eval.opponents=[random] would do nothing
eval.function=os.path:join eval.explore=true -> eval.explore=True is of episodes that rlframe plays, not of eval.func
eval.function=os.path:join eval.max_length=5 -> eval.max_length=5 is of episodes that rlframe plays, not of eval.func
eval.opponents=[random] eval.env_steps=40 -> eval.env_steps=40 is of episodes that rlframe plays, not of eval.opponents
name=x/../../evil -> name='x/../../evil' must be usable as the name of a directory
resume= -> resume= is empty, perhaps an unset shell variable
experiment= seed=1 -> experiment= is empty, perhaps an unset shell variable
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_bad_words_are_refused_in_one_message_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words, _, message = line.partition(" -> ")
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []
