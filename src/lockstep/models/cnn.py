"""The configurable CNN: 3x3 convolutions with 2x2 pooling while the image allows, then two linear layers."""

import torch.nn.functional as F
from torch import Tensor, nn


class CNN(nn.Module):
    """Convolutions with pooling, then a hidden linear layer."""

    def __init__(self, shape: tuple[int, ...], channels: tuple[int, ...], hidden: int, classes: int) -> None:
        super().__init__()
        colours, height, width = shape
        self.convolutions = nn.ModuleList()
        self.conv_pixels: list[int] = []  # where each convolution writes
        for before, after in zip((colours, *channels), channels, strict=False):
            self.convolutions.append(nn.Conv2d(before, after, kernel_size=3, padding=1))
            self.conv_pixels.append(height * width)
            if min(height, width) >= 2:
                height, width = height // 2, width // 2
        last = channels[-1] if channels else colours
        self.hidden = nn.Linear(last * height * width, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = convolution(x).relu()
            if min(x.shape[2], x.shape[3]) >= 2:
                x = F.max_pool2d(x, 2)
        logits: Tensor = self.head(self.hidden(x.flatten(1)).relu())
        return logits

    def forward_flops(self) -> int:
        """Multiplications and additions of one sample's forward pass."""
        kernels = [p for p in self.convolutions.parameters() if p.dim() == 4]
        convolutions = sum(kernel.numel() * pixels for kernel, pixels in zip(kernels, self.conv_pixels, strict=True))
        return 2 * (convolutions + self.hidden.weight.numel() + self.head.weight.numel())
