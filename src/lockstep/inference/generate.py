"""Text from a trained GPT: plainly, over tensor-parallel ranks, or through DeepSpeed's inference engine."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.inference.cache import KeyValueCache
from lockstep.models.gpt import GPT

Engine = Literal["plain", "deepspeed"]


def generate(
    model: nn.Module,
    prompt: Tensor,
    tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    cache: bool = True,
) -> Tensor:
    """Append `tokens` to a prompt (1-D). A temperature of 0 takes the likeliest token each time (greedy).

    The model sees at most its context; a longer text is seen from its end.
    """
    return generate_batch(model, [prompt], tokens, temperature, top_k, seed, cache)[0]


@torch.no_grad()
def generate_batch(
    model: nn.Module,
    prompts: Sequence[Tensor],
    tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    cache: bool = True,
    vocabulary: int | None = None,
) -> list[Tensor]:
    """As `generate`, for several prompts at once, of any lengths. `cache`: keep keys and values (`inference/cache.py`).

    `vocabulary`: choose among the first so many tokens only, where a model has room for more than its data.
    """
    plain: Any = getattr(model, "module", model)
    context = int(plain.shape.context)
    device = next(model.parameters()).device
    generators = [torch.Generator(device).manual_seed(seed + row) for row in range(len(prompts))]
    texts = [prompt.to(device) for prompt in prompts]
    kept = KeyValueCache(plain, len(texts)) if cache else None
    if kept is not None:
        kept.open()
    try:
        for number in range(tokens):
            if kept is not None and max(len(text) for text in texts) > context:  # every token has moved
                kept.close()
                kept = None
            if kept is None or number == 0:
                logits = after_whole_texts(model, [text[-context:] for text in texts])
            else:
                kept.at([len(text) - 1 for text in texts], device)
                logits = model(torch.stack([text[-1:] for text in texts]))[:, -1]
            chosen = choose(logits[:, :vocabulary].float(), temperature, top_k, generators)
            texts = [torch.cat((text, token)) for text, token in zip(texts, chosen.split(1), strict=True)]
    finally:
        if kept is not None:
            kept.close()
    return texts


def after_whole_texts(model: nn.Module, texts: list[Tensor]) -> Tensor:
    """Logits behind the last token of each, (texts, vocabulary). What fills a shorter text up comes after it, and so
    is seen by nothing that counts.
    """
    ends = torch.tensor([len(text) - 1 for text in texts], device=texts[0].device)
    padded = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    logits: Tensor = model(padded)
    return logits[torch.arange(len(texts), device=ends.device), ends]


def choose(logits: Tensor, temperature: float, top_k: int | None, generators: list[torch.Generator]) -> Tensor:
    """The next token of each text. Each draws numbers of its own: what is beside it in the batch changes nothing."""
    if temperature == 0:
        return logits.argmax(-1)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature  # the largest is 0, however small the temperature
    if top_k is not None:
        worst = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        scaled = scaled.masked_fill(logits < worst, float("-inf"))
    chances = scaled.softmax(-1)
    return torch.cat([torch.multinomial(row, 1, generator=g) for row, g in zip(chances, generators, strict=True)])


def check_generates(model: nn.Module) -> GPT:
    if not isinstance(model, GPT):
        raise UserError(f"{type(model).__name__} is not a language model; generate needs model.name gpt")
    return model
