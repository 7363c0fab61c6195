"""Tiny random models for the engines' tests: large weights, so that positions and attention change what comes out."""

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

VOCAB = 96
STOPS = tuple(range(8))
PROMPTS = [[15, 16, 17, 18], [19, 20, 21, 22, 23, 24, 25], [11]]
MODELS = ("llama", "gpt2", "qwen2")


def tiny_config(name: str, **changes: object) -> PretrainedConfig:
    """A config of two layers; llama and gpt2 tie their embeddings, qwen2 does not and has biases."""
    shared = {"vocab_size": VOCAB, "initializer_range": 0.25, "bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2":
        return GPT2Config(**{**shared, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **changes})
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": name == "llama",
    }
    config_class = {"llama": LlamaConfig, "qwen2": Qwen2Config}[name]
    return config_class(**{**shared, **sizes, **changes})


def plain_model(config: PretrainedConfig, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Transformers' own model in fp32 with the given weights."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    copy_weights(dict(model.named_parameters()), weights)
    return model


def copy_weights(into: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    """Write weights into live tensors by name; the names must be the same."""
    assert into.keys() == weights.keys()
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(weights[name])


def reference_logits(model: PreTrainedModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Logits [len(response), V] that predict each response token, from one plain forward of the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0]
    return logits[len(prompt) - 1 : -1]


def responses_of(batch: object) -> list[list[int]]:
    """The response ids of each row as lists, without padding."""
    ids, lengths = batch["response_ids"].tolist(), batch["response_len"].tolist()
    return [row[:length] for row, length in zip(ids, lengths, strict=True)]
