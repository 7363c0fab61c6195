"""Reinforcement learning of language models: data, rewards, advantages, losses and loops."""
