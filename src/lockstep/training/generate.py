"""Text from a trained GPT: plainly, or through DeepSpeed's inference engine."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.models.gpt import GPT

Engine = Literal["plain", "deepspeed"]


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Append `tokens` to a prompt (1-D). A temperature of 0 takes the likeliest token each time (greedy).

    The model sees at most its context; a longer text is seen from its end.
    """
    context = _context_of(model)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    text = prompt.to(device)
    for _ in range(tokens):
        logits = model(text[None, -context:])[0, -1].float()  # (vocabulary)
        if temperature == 0:
            chosen = logits.argmax()
        else:
            if top_k is not None:
                worst = logits.topk(min(top_k, len(logits))).values[-1]
                logits = logits.masked_fill(logits < worst, float("-inf"))
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[0]
        text = torch.cat((text, chosen[None]))
    return text


def _context_of(model: nn.Module) -> int:
    plain: Any = getattr(model, "module", model)
    return int(plain.shape.context)


def check_generates(model: nn.Module) -> GPT:
    if not isinstance(model, GPT):
        raise UserError(f"{type(model).__name__} is not a language model; generate needs model.name gpt")
    return model


def through_deepspeed(model: nn.Module) -> nn.Module:
    """The same model in DeepSpeed's inference engine, in the dtype that it has."""
    from lockstep.strategies.deepspeed import import_deepspeed

    deepspeed = import_deepspeed()
    try:
        import transformers  # noqa: F401 (DeepSpeed's engine looks its layers up there)
    except ImportError:
        raise UserError(
            'DeepSpeed\'s inference engine needs the transformers package: pip install -e ".[deepspeed]"'
        ) from None
    dtype = next(model.parameters()).dtype
    engine: nn.Module = deepspeed.init_inference(model, dtype=dtype, replace_with_kernel_inject=False)
    return engine
