"""Hugging Face's GPT-2, Llama, Qwen2 and Mistral with random weights, which nobody may change, in float64.

torch's RMSNorm stands in place of theirs, which computes in float32 whatever it is given. The ranks don't need
transformers, so it is imported in the functions.
"""

from functools import cache

import torch
from torch import nn

from tplab.gpt.hugging_face import from_hugging_face, gpt_config
from tplab.gpt.model import ParallelGPT
from tplab.tensor.full_state import load_full_state_dict

HIDDEN, HEADS, FFN, LENGTH, LAYERS, VOCAB = 16, 4, 24, 24, 2, 300
BATCH, PROMPT, NEW = 3, 5, 12  # texts, and their tokens before and after generation
KINDS = ("gpt2", "llama", "llama 1 kv", "llama 3.1", "qwen2", "mistral")
SCALED = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0}


@cache
def hugging_face(kind, vocab=VOCAB, seed=0, dtype=torch.float64):
    """One of KINDS. In another dtype than float64, RMSNorm is theirs."""
    import transformers as hf

    torch.manual_seed(seed)
    shared = {"vocab_size": vocab, "bos_token_id": 0, "eos_token_id": None, "initializer_range": 0.4}
    shared["attn_implementation"] = "sdpa"
    if kind == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "n_inner": FFN, "n_positions": LENGTH}
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **dropout, **shared))
    else:
        shared |= {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": FFN, "rms_norm_eps": 1e-4}
        shared |= {"num_attention_heads": HEADS, "max_position_embeddings": LENGTH}
        default = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
        scaled = {"rope_parameters": {**SCALED, "original_max_position_embeddings": 16}}
        name, options = {
            "llama": ("Llama", {"num_key_value_heads": 2, **default}),
            "llama 1 kv": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True, **default}),
            "llama 3.1": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, **scaled}),
            "qwen2": ("Qwen2", {"num_key_value_heads": 1}),
            "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
        }[kind]
        model = getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**options, **shared))
        if dtype == torch.float64:
            use_torchs_rms_norm(model)
    for parameter in model.parameters():  # biases and norms too
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model.to(dtype).eval()


def use_torchs_rms_norm(model):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)


# What they are given


def prompt():
    return torch.randint(0, VOCAB, (BATCH, PROMPT), generator=torch.Generator().manual_seed(8))


def given(kind):
    model = hugging_face(kind)
    return model.state_dict(), gpt_config(model.config.to_dict())


def make(state, config, group=None):
    model = ParallelGPT(config, dtype=torch.float64, group=group)
    load_full_state_dict(model, from_hugging_face(state, config), group)
    return model


def tokens():
    generator = torch.Generator().manual_seed(8)
    ids, targets = (torch.randint(0, VOCAB, (2, LENGTH), generator=generator) for _ in range(2))
    return ids, targets


def their_text(model, prompt, new):
    """The greedy continuation."""
    ones = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=ones, max_new_tokens=new, do_sample=False, pad_token_id=0)
