"""Residual networks in their CIFAR form: a 3x3 stem without pooling, three or four stages, global average pooling."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UserError

STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks of each stage, of the published depths."""
BOTTLENECKS = 50
"""From this depth on, the published ones have them."""

Norm = Callable[[int], nn.Module]


class BatchNorm(nn.BatchNorm2d):
    """Where a channel has a single value (one image of one pixel) there is no variance: use the running one."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.numel() == x.shape[1]:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(x)


def batch_norm(channels: int) -> nn.Module:
    return BatchNorm(channels)


def group_norm(channels: int) -> nn.Module:
    """Statistics of one sample, not of the batch: the same at every world size."""
    return nn.GroupNorm(min(8, channels), channels)


class ResidualBlock(nn.Module):
    """A residual block: two 3x3 convolutions, or 1x1, 3x3, 1x1 with four times the output channels (bottleneck)."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool, norm: Norm) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        # (input channels, output channels, kernel, stride) of each convolution
        plan = (
            [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
            if bottleneck
            else [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        )
        layers: list[nn.Module] = []
        for before, after, kernel, step in plan:
            layers += [convolution(before, after, kernel, step), norm(after), nn.ReLU()]
        self.branch = nn.Sequential(*layers[:-1])  # the last ReLU comes after the sum
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(convolution(inputs, outputs, 1, stride), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.branch(x) + self.shortcut(x)
        return total.relu()


def convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def stages_of(depth: int) -> tuple[int, ...]:
    """How many blocks each stage has: as published, or a third of 6n + 2 layers."""
    if depth in STAGES:
        return STAGES[depth]
    if depth % 6 == 2:
        return ((depth - 2) // 6,) * 3
    known = ", ".join(map(str, STAGES))
    raise UserError(
        f"model.depth is {depth}, but it must be one of {known}, or 6n + 2 (20, 32, 44, 56, 110); for any other give "
        f"model.stages, the basic blocks of each stage (1 1 1 1)"
    )


class ResNet(nn.Module):
    """A stem, stages of residual blocks, and a linear head on the mean over all pixels."""

    def __init__(
        self,
        shape: tuple[int, ...],
        depth: int,
        width: int,
        classes: int,
        norm: str = "batch",
        stages: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.shape = shape
        make_norm: Norm = batch_norm if norm == "batch" else group_norm
        bottleneck = not stages and depth in STAGES and depth >= BOTTLENECKS
        self.stem = nn.Sequential(convolution(shape[0], width, 3, 1), make_norm(width), nn.ReLU())
        blocks: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(stages or stages_of(depth)):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(ResidualBlock(channels, width * 2**stage, stride, bottleneck, make_norm))
                channels = width * 2**stage * (4 if bottleneck else 1)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))  # (batch, channels, height / 2^(stages - 1), ...)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits

    def forward_flops(self) -> int:
        """Multiplications and additions of one sample's forward pass, counted layer by layer."""
        height, width = self.shape[1:]

        def flops_of(layer: nn.Conv2d) -> int:
            nonlocal height, width
            height, width = (-(-size // layer.stride[0]) for size in (height, width))
            kernel = layer.kernel_size[0] * layer.kernel_size[1]
            return 2 * kernel * layer.in_channels * layer.out_channels * height * width

        stem = self.stem[0]
        assert isinstance(stem, nn.Conv2d)
        total = flops_of(stem)
        for block in self.blocks:
            assert isinstance(block, ResidualBlock)
            before = height, width
            total += sum(flops_of(m) for m in block.branch.modules() if isinstance(m, nn.Conv2d))
            after, (height, width) = (height, width), before  # the shortcut starts where the branch did
            total += sum(flops_of(m) for m in block.shortcut.modules() if isinstance(m, nn.Conv2d))
            height, width = after
        return total + 2 * self.head.in_features * self.head.out_features
