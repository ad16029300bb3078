"""Runs whose exact resume is tested: a command line for each kind of state that a run has."""

BRIEF = "model.hidden=[8] eval.n_episodes=1 eval.n_envs=1"
SMALL = f"{BRIEF} runner.log_interval_steps=80 runner.n_steps=160"
ON_POLICY = f"{SMALL} sampler=serial sampler.batch_T=16 sampler.batch_B=4"
PPO = "algo=ppo algo.epochs=2 algo.minibatches=2"
PQN = "algo=pqn algo.epochs=2 algo.minibatches=2"
REPLAY = f"{BRIEF} runner.log_interval_steps=60 runner.n_steps=120 sampler=serial sampler.batch_T=4 sampler.batch_B=2"
REPLAY += " algo.learning_starts=20 algo.replay.size=300"
SHORT = REPLAY.replace("batch_B=2", "batch_B=1")
RAINBOW = (
    "algo.double=true algo.dueling=true algo.explore=noisy algo.n_step=3 algo.prioritized=true algo.value=categorical"
)
BTR = "algo.dueling=true algo.explore=noisy algo.n_step=3 algo.prioritized=true algo.munchausen=0.9"
BTR += " algo.value=implicit algo.n_atoms=4 algo.n_cosines=8 model.spectral_norm=true model.image_pool=2"
BTR += " model.encoder=impala model.channels=[4,4] model.image_hidden=[8]"
EACH_STEP = "algo.batch_size=4 algo.replay_ratio=4"  # an update
TWO_ROWS = "algo.batch_size=2 algo.replay_ratio=3"  # 12 updates a batch
WRAPPED = "env.resize=[9,9] env.frame_stack=3 env.wrappers=tests.envs.wrapping:Plus"
CARTPOLE, PENDULUM = "env=CartPole-v1", "env=Pendulum-v1 env_kwargs.max_episode_steps=45"
WALK, PICTURES, OPAQUE, TELLING, UNREPEATABLE = (  # episodes are cut by the ends of batches
    f"env=tests.envs.resumable:{name} env_kwargs.length=9"
    for name in ("Walk", "Pictures", "Opaque", "Telling", "Unrepeatable")
)
LINEAR = "algo.learning_rate=linear(1e-3,1e-4)"
SWING = "env=Pendulum-v1 env_kwargs.max_episode_steps=9"
EVOLUTION = f"runner=evolution {SWING} {SMALL} sampler=serial algo.directions=2"
TRANSFORMER = "model.memory=transformer model.memory_size=8 model.memory_window=12 model.memory_layers=2"
CONVOLUTIONS = "model.channels=[4,4] model.kernels=[3,2] model.strides=[2,1] model.pools=[1,2] model.image_hidden=[8]"
DELAYED = "algo.batch_size=8 algo.replay_ratio=1 algo.policy_interval=2 algo.target_interval=3"
SEQUENCES = "algo.replay_ratio=1 algo.batch_size=2 algo.burn_in=2 algo.learn_T=4"
BY_STEPS = "algo.target_interval_steps=30 algo.unique=true algo.initial_priority=2"
SOFT = "algo.huber_delta=inf algo.target_interval=2 algo.target_tau=linear(0.5,0.1)"
CROWD, GAME = "env=tests.agents_envs:Crowd", "env=rlframe.envs.debug_agents:TwoStepGame env_kwargs.action=box"
NORM_INPUT = "model.norm_input=true"
CROSSQ = f"model.norm=renorm model.norm_after=true {NORM_INPUT} algo.target_critics=false"
XQC = f"model.norm=batch {NORM_INPUT} model.unit_rows=true algo.value=categorical algo.normalize_return=true"
FLASHSAC = f"{XQC} model.unit_gains=true model.blocks=1 algo.policy_first=true algo.return_limit=5"
FLASHSAC += " algo.explore=sample_hold model.log_std_bound=tanh algo.discount=auto"
SIMBAV2 = "model.blocks=1 model.block=sphere model.unit_rows=true model.normalize_observation=true"
SIMBAV2 += " algo.policy_first=true algo.value=categorical algo.normalize_return=true algo.return_limit=5"
REDQ = "algo.n_critics=4 algo.n_target_critics=2 algo.policy_from=mean"
DROQ = "model.critic.norm=layer model.critic.dropout=0.1"
TQC = "algo.value=quantile algo.n_atoms=5 algo.target_from=truncated algo.drop_atoms=1"
TAG = "env=mpe2/simple_tag_v3 agents.map.adversary_*=pred agents.map.agent_*=prey agents.policies.prey.algo=dqn"
TAG += " agents.policies.pred.model.memory=lstm agents.policies.pred.model.memory_size=8"
for word in ("learning_starts=20", "replay.size=300", "batch_size=8", "replay_ratio=1", "prioritized=true"):
    TAG += f" agents.policies.prey.algo.{word}"
LEAGUE = "agents.league.opponents=2 agents.league.games=2 agents.league.interval_steps=40 agents.league.size=3"
ROUNDS = "env=tests.envs.rock_paper_scissors:RockPaperScissors"
CASES = {
    "ppo": f"{PPO} {CARTPOLE} model.normalize_observation=true {ON_POLICY}",
    "ppo_moded": f"{PPO} {CARTPOLE} model.encoder=tests.models.moded:Moded {ON_POLICY}",
    "ppo_vector": f"{PPO} {CARTPOLE} env_backend=native algo.clip=inf algo.kl_coef=1 {ON_POLICY}",
    "ppo_normalized_rewards": f"{PPO} {PENDULUM} env.normalize_reward=true env.reward_clip=[-5,5] {ON_POLICY}",
    "ppo_wrapped": f"{PPO} {PICTURES} {WRAPPED} {CONVOLUTIONS} {ON_POLICY}",
    "several_policies": f"{PPO} {TAG} env.normalize_reward=true {ON_POLICY}",
    "agents_in_turn": f"{PPO} env=classic/connect_four_v3 {ON_POLICY}",
    "a2c": f"algo=a2c {CARTPOLE} {ON_POLICY}",
    "pqn": f"{PQN} {CARTPOLE} model.norm=layer {ON_POLICY}",
    "pqn_lstm": f"{PQN} {CARTPOLE} algo.explore=noisy model.memory=lstm model.memory_size=8 {ON_POLICY}",
    "ppo_continuous": f"{PPO} {PENDULUM} {ON_POLICY}",
    "ppo_lstm": f"{PPO} {CARTPOLE} model.memory=lstm model.memory_size=8 {ON_POLICY}",
    "dqn": f"algo=dqn {CARTPOLE} algo.prioritized=true algo.batch_size=8 algo.replay_ratio=2 {REPLAY}",
    "rainbow": f"algo=dqn {CARTPOLE} {RAINBOW} algo.batch_size=8 {REPLAY}",
    "btr": f"algo=dqn {PICTURES} {BTR} algo.batch_size=8 algo.replay_ratio=4 algo.target_interval=3 {REPLAY}",
    "btr_alone": f"algo=dqn {PICTURES} {BTR} {EACH_STEP} {SHORT}",
    "r2d1": f"algo=r2d1 {CARTPOLE} {SEQUENCES} model.memory=lstm {REPLAY}",
    "dqn_between_updates": f"algo=dqn {CARTPOLE} algo.prioritized=true {BY_STEPS} {TWO_ROWS} {LINEAR} {REPLAY}",
    "dqn_in_torch": f"algo=dqn {PICTURES} {CONVOLUTIONS} algo.batch_size=4 algo.replay_ratio=2 {REPLAY}",
    "rainbow_images": f"algo=dqn {PICTURES} {RAINBOW} {CONVOLUTIONS} {EACH_STEP} {SHORT}",
    "ppo_in_torch": f"{PPO} {PICTURES} {CONVOLUTIONS} model.memory=gru model.memory_size=8 {ON_POLICY}",
    "sac": f"algo=sac {PENDULUM} algo.batch_size=8 algo.replay_ratio=1 {REPLAY}",
    "sac_discrete": f"algo=sac {CARTPOLE} algo.batch_size=8 algo.replay_ratio=1 {REPLAY}",
    "ddpg": f"algo=ddpg {PENDULUM} model.normalize_observation=true algo.batch_size=8 algo.replay_ratio=1 {REPLAY}",
    "td3_chosen_critics": f"algo=td3 {PENDULUM} algo.n_critics=5 algo.n_target_critics=2 algo.prioritized=true "
    f"algo.initial_priority=td algo.batch_size=8 algo.replay_ratio=1 {REPLAY}",
    "td3": f"algo=td3 {PENDULUM} algo.batch_size=8 algo.replay_ratio=1 {REPLAY}",
    "bc": f"algo=bc {PENDULUM} algo.batch_size=8 algo.replay_ratio=1 {REPLAY}",
    "bc_lstm": f"algo=bc {CARTPOLE} algo.learn_T=4 algo.batch_size=2 algo.replay_ratio=1 model.memory=lstm {REPLAY}",
    "marwil": f"algo=marwil {CARTPOLE} algo.batch_size=8 algo.replay_ratio=1 {REPLAY}",
    "iql": f"algo=iql {PENDULUM} algo.batch_size=8 algo.replay_ratio=1 {REPLAY}",
    "td3_bc": f"algo=td3_bc {PENDULUM} algo.batch_size=8 algo.replay_ratio=1 {REPLAY}",
    "cql": f"algo=cql {PENDULUM} algo.learn_conservative_weight=true algo.batch_size=8 algo.replay_ratio=1 {REPLAY}",
    "es": f"algo=es {EVOLUTION} model.normalize_observation=true",
    "ars": f"algo=ars {EVOLUTION} algo.top_directions=1 {LINEAR}",
    "envs_restored_by_actions": f"{PPO} {OPAQUE} {ON_POLICY}",
    "envs_restored_by_their_state": f"{PPO} {TELLING} {ON_POLICY}",
    "ppo_transformer": f"{PPO} {CARTPOLE} {TRANSFORMER} {ON_POLICY}",
    "r2d1_transformer": f"algo=r2d1 {CARTPOLE} {SEQUENCES} {TRANSFORMER} {REPLAY}",
    "sac_layer_norm": f"algo=sac {PENDULUM} model.norm=layer algo.batch_size=8 algo.replay_ratio=1 {REPLAY}",
    "ppo_distribution": f"{PPO} {PENDULUM} model.distribution=beta {ON_POLICY}",
    "ppo_convolutions": f"{PPO} {PICTURES} {CONVOLUTIONS} {ON_POLICY}",
    "ppo_kl_penalty": f"{PPO} {CARTPOLE} algo.clip=inf algo.kl_coef=1 {ON_POLICY}",
    "dqn_initial_priorities": f"algo=dqn {CARTPOLE} algo.prioritized=true algo.initial_priority=td algo.n_step=3 "
    f"{SOFT} algo.batch_size=8 {REPLAY}",
    "r2d1_state_interval": f"algo=r2d1 {CARTPOLE} algo.state_interval=8 {SOFT} {SEQUENCES} model.memory=lstm {REPLAY}",
    "ddpg_target_noise": f"algo=ddpg {PENDULUM} algo.target_noise=0.2 algo.n_critics=2 algo.target_clip=9 {DELAYED} "
    f"algo.prioritized=true algo.initial_priority=td {REPLAY}",
    "qmix": f"algo=qmix {CROWD} algo.n_step=2 algo.batch_size=8 algo.replay_ratio=2 algo.target_interval=3 {REPLAY}",
    "maddpg": f"algo=maddpg {GAME} agents.global_state=true {DELAYED} algo.target_noise=0.2 {REPLAY}",
    "crossq": f"{CROSSQ} algo=sac {PENDULUM} {DELAYED} {REPLAY}",
    "flashsac": f"{FLASHSAC} algo=sac {PENDULUM} {DELAYED} {REPLAY}",
    "simbav2": f"{SIMBAV2} algo=sac {PENDULUM} algo.batch_size=8 algo.replay_ratio=1 {REPLAY}",
    "xqc": f"{XQC} algo=sac {PENDULUM} {DELAYED} {REPLAY}",
    "redq_droq_tqc": f"{REDQ} {DROQ} {TQC} algo=sac {PENDULUM} {DELAYED} {REPLAY}",
    "sac_gaussian_prior": f"algo=sac {PENDULUM} algo.action_prior=gaussian {DELAYED} {REPLAY}",
    "ppo_league": f"{PPO} {ROUNDS} {LEAGUE} {ON_POLICY}",
    "dqn_league": f"algo=dqn {ROUNDS} {LEAGUE} agents.league.draw=latest algo.batch_size=8 {REPLAY}",
}
