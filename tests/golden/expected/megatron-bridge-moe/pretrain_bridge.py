"""Pretrains deepseek-v3 with Megatron-Bridge 0.6: the recipe vanilla_gpt_pretrain_config with the overrides of a file.

usage: torchrun ... pretrain_bridge.py bridge_overrides.txt [section.field=value ...]

A field that does not exist is refused; Megatron-Bridge itself would set it and go on without it.
"""

import ast
import re
import sys
from pathlib import Path

ACTIVATIONS = ("silu", "gelu", "relu", "squared_relu")


def stated(arguments):
    """(field, text) of every override: lines of files, then words of the command line."""
    for argument in arguments:
        lines = [argument] if "=" in argument else Path(argument).read_text(encoding="utf-8").splitlines()
        for line in lines:
            line = line.strip()
            if line and not line.startswith("#"):
                field, equals, text = line.partition("=")
                if not equals:
                    raise SystemExit(f"{argument}: {line!r} is not section.field=value")
                yield field.strip(), text.strip()


def parsed(field, text):
    """The value that the field takes."""
    if field == "model.activation_func":
        return activation(text)
    if field == "model.attention_backend":
        from megatron.core.transformer.enums import AttnBackend

        return AttnBackend[text]
    if field == "model.moe_layer_freq" and "[" in text:
        return layers(text)
    if re.fullmatch(r"\[[\w, ]*\]", text):
        return [parsed("", item.strip()) for item in text[1:-1].split(",") if item.strip()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def layers(text):
    """A list written as sums and multiples of lists: ([0]*3+[1]*58)."""

    def value(node):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return value(node.left) + value(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return value(node.left) * value(node.right)
        return ast.literal_eval(node)

    return value(ast.parse(text, mode="eval").body)


def activation(name):
    """The function of that name."""
    if name not in ACTIVATIONS:
        raise SystemExit(f"model.activation_func={name}: one of {', '.join(ACTIVATIONS)}")
    if name == "squared_relu":
        from megatron.core.activations import squared_relu

        return squared_relu
    import torch.nn.functional as functional

    return getattr(functional, name)


def configuration(arguments):
    """The recipe with every override applied."""
    from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    config = vanilla_gpt_pretrain_config()
    values = dict(stated(arguments))
    if values.get("model.multi_latent_attention") == "True":
        from megatron.bridge.models.mla_provider import MLAModelProvider

        config.model = MLAModelProvider()
    for field, text in values.items():
        *path, name = field.split(".")
        owner = config
        for part in path:
            if part == "mixed_precision" and isinstance(owner.mixed_precision, str):
                owner.mixed_precision = get_mixed_precision_config(owner.mixed_precision)
            owner = getattr(owner, part, None)
        if owner is None or not hasattr(owner, name):
            raise SystemExit(f"{field}: Megatron-Bridge has no such field")
        setattr(owner, name, parsed(field, text))
    return config


def main():
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    pretrain(config=configuration(sys.argv[1:]), forward_step_func=forward_step)


if __name__ == "__main__":
    main()
