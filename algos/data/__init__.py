"""Prompts: rows from files or task generators, token ids by the model's chat template, exact batch positions."""

from algos.data.chat import Chat
from algos.data.dataset import Prompt, PromptDataset
from algos.data.loader import PromptLoader
from algos.data.rows import DataSpec, Row, load_rows

__all__ = ["Chat", "DataSpec", "Prompt", "PromptDataset", "PromptLoader", "Row", "load_rows"]
