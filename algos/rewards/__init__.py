"""Rewards: what a response is worth, by rules or by a function of the user's."""

from algos.rewards.base import InlineReward, Outcome, Reward, RewardFunction, Sample
from algos.rewards.load import load_reward
from algos.rewards.manager import OverlongPenalty, RewardManager, Scores
from algos.rewards.pool import WorkerReward

__all__ = [
    "InlineReward",
    "Outcome",
    "OverlongPenalty",
    "Reward",
    "RewardFunction",
    "RewardManager",
    "Sample",
    "Scores",
    "WorkerReward",
    "load_reward",
]
