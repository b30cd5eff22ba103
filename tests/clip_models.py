"""A tiny CLIP with random weights, its tokenizer and image processor, saved as transformers saves the real one."""

from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,'"
MAX_TOKENS = 12


def save_tiny_clip(folder: Path, seed: int = 10) -> Path:
    """Words are spelt: one token a letter. It reads 12 tokens and images of 16×16."""
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    torch.manual_seed(seed)
    text = {
        "vocab_size": len(vocab),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": MAX_TOKENS,
        "bos_token_id": vocab["<|startoftext|>"],
        "eos_token_id": vocab["<|endoftext|>"],
        "pad_token_id": vocab["<|endoftext|>"],
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # what is the same for all inputs stays small, so that cosines differ in sign
            parameter.data.normal_(0, 0.05 if "position_embedding" in name else 0.6)
        elif "class_embedding" in name:
            parameter.data.normal_(0, 0.05)
    model.save_pretrained(folder)
    CLIPTokenizer(vocab, [], model_max_length=MAX_TOKENS).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder
