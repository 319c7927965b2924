"""Models and data as people bring them from elsewhere, none made for this package: imported by tests as
`tests.elsewhere:Vit`. Dropout, several inputs, outputs that are objects, (N, C, H, W), tuples, streams.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

VOCABULARY = 40


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- a vision transformer, with dropout ----------------------------------------------------------------------------


class Vit(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.positions = nn.Parameter(torch.zeros(1, 5, 16))
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(images), -1, -1), patches), 1) + self.positions
        logits: Tensor = self.head(self.encoder(x)[:, 0])
        return logits


def pictures(count: int = 48) -> Any:
    images = torch.randn(count, 3, 8, 8, generator=generator(0))
    return (images, images[:, 0, 0, :5].argmax(1)), (images[:9], images[:9, 0, 0, :5].argmax(1))


# ---- a masked language model of transformers: dict in, object out --------------------------------------------------


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model: nn.Module = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=12, **sizes))
    return model


def masked(count: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    tokens = torch.randint(4, VOCABULARY, (count, 12), generator=generator(seed))
    lengths = torch.randint(5, 13, (count, 1), generator=generator(seed + 1))
    attention = (torch.arange(12) < lengths).long()
    hidden = (torch.rand(count, 12, generator=generator(seed + 2)) < 0.3) & attention.bool()
    hidden[:, 0] = True
    targets = tokens.masked_fill(~hidden, -100)
    return {"input_ids": tokens.masked_fill(hidden, 3), "attention_mask": attention}, targets


def masked_text(count: int = 48) -> Any:
    return masked(count, 0), masked(9, 7)


# ---- a U-Net: outputs (N, C, H, W) ---------------------------------------------------------------------------------


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down(images)
        coarse = self.up(self.middle(F.max_pool2d(fine, 2)))
        classes: Tensor = self.out(torch.cat((fine, coarse), 1))
        return classes


class Segments(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.images = torch.randn(count, 1, 8, 8, generator=generator(2))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return image, (image[0] > 0).long() + (image[0] > 1).long()


def segments(count: int = 48) -> Any:
    return Segments(count), Segments(9)


# ---- a tied LSTM on streams: returns a tuple -----------------------------------------------------------------------


class Lstm(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Any]:
        outputs, state = self.lstm(self.embedding(tokens))
        return self.head(outputs), state


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(self.count):
            tokens = torch.randint(VOCABULARY, (13,), generator=generator(index))
            yield tokens[:-1], tokens[1:]


def streams(count: int = 48) -> Any:
    return Stream(count), Stream(9)


# ---- T5: two inputs, an object, a loss of its own ------------------------------------------------------------------


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2, "dropout_rate": 0.0}
    model: nn.Module = T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))
    return model


def translations(count: int = 48) -> Any:
    source = torch.randint(2, VOCABULARY, (count, 7), generator=generator(4))
    target = torch.randint(2, VOCABULARY, (count, 5), generator=generator(5))
    target[:, 4] = torch.where(target[:, 3] % 2 == 0, 0, target[:, 4])  # 0 is padding
    shifted = F.pad(target[:, :-1], (1, 0))
    everything = {"input_ids": source, "decoder_input_ids": shifted}, target
    return everything, ({key: value[:9] for key, value in everything[0].items()}, target[:9])


def without_padding(outputs: Any, targets: Tensor) -> Tensor:
    """Gets what the model returns; ignores another target than -100."""
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), ignore_index=0)
