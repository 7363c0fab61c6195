"""Weights from training shards into live inference tensors: only the missing bytes move."""
