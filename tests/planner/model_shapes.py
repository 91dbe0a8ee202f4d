"""Models as people hold their blocks: in dicts, attributes, plain lists, stages; shared ones, and none at all.

Each case returns (model, batch, loss or None). All are tiny and on a fixed seed.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, LENGTH, SIZE, VOCABULARY = 32, 32, 4, 50
Case = tuple[nn.Module, dict[str, torch.Tensor], Callable[..., torch.Tensor] | None]


def token_ids() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (SIZE, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "labels": ids}


def images(classes: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(4, 3, 32, 32, generator=generator),
        "y": torch.randint(0, classes, (4,), generator=generator),
    }


class Attention(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def feed_forward(width=WIDTH):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    def __init__(self, width=WIDTH, dropout=0.1):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.mlp, self.dropout = nn.LayerNorm(width), feed_forward(width), nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class LanguageModel(nn.Module):
    """Embedding, whatever `body` does, and a head; the loss is the mean cross-entropy."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def body(self, x):
        raise NotImplementedError

    def logits(self, ids):
        return self.head(self.norm(self.body(self.embedding(ids))))

    def forward(self, ids, labels):
        return F.cross_entropy(self.logits(ids).flatten(0, 1), labels.flatten())


def chain(model_class: type[nn.Module]) -> Case:
    torch.manual_seed(0)
    return model_class(), token_ids(), None


def module_dict() -> Case:
    class Model(LanguageModel):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({str(i): Block() for i in range(3)})

        def body(self, x):
            for layer in self.layers.values():
                x = layer(x)
            return x

    return chain(Model)


def attributes() -> Case:
    class Model(LanguageModel):
        def __init__(self):
            super().__init__()
            self.block1, self.block2, self.block3 = Block(), Block(), Block()

        def body(self, x):
            return self.block3(self.block2(self.block1(x)))

    return chain(Model)


def plain_list() -> Case:
    class Model(LanguageModel):
        def __init__(self):
            super().__init__()
            self.blocks = [Block() for _ in range(3)]
            self.weights = nn.ParameterList([p for block in self.blocks for p in block.parameters()])

        def body(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    return chain(Model)


def plain_tuple_of_dicts() -> Case:
    class Model(LanguageModel):
        def __init__(self):
            super().__init__()
            self.blocks = tuple({"mix": Block(), "wide": feed_forward()} for _ in range(2))
            modules = [module for pair in self.blocks for module in pair.values()]
            self.weights = nn.ParameterList([p for module in modules for p in module.parameters()])

        def body(self, x):
            for pair in self.blocks:
                x = pair["mix"](x)
                x = x + pair["wide"](x)
            return x

    return chain(Model)


def nested_lists() -> Case:
    """Stages of blocks, each stage a list in a list, with a layer between them."""

    class Model(LanguageModel):
        def __init__(self):
            super().__init__(2 * WIDTH)
            widths = (WIDTH, 2 * WIDTH)
            self.stages = nn.ModuleList([nn.ModuleList([Block(w) for _ in range(2)]) for w in widths])
            self.between = nn.Linear(WIDTH, 2 * WIDTH)

        def body(self, x):
            for i, stage in enumerate(self.stages):
                for block in stage:
                    x = block(x)
                x = self.between(x) if i == 0 else x
            return x

    return chain(Model)


def stage_modules() -> Case:
    class Stage(nn.Module):
        def __init__(self, width, count):
            super().__init__()
            self.blocks = nn.ModuleList([Block(width) for _ in range(count)])
            self.widen = nn.Linear(width, 2 * width)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.widen(x)

    class Model(LanguageModel):
        def __init__(self):
            super().__init__(4 * WIDTH)
            self.stage1, self.stage2 = Stage(WIDTH, 2), Stage(2 * WIDTH, 2)

        def body(self, x):
            return self.stage2(self.stage1(x))

    return chain(Model)


def shared_block() -> Case:
    """One block that runs six times, as ALBERT's does."""

    class Model(LanguageModel):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def body(self, x):
            for _ in range(6):
                x = self.block(x)
            return x

    return chain(Model)


def sublayers_in_pairs() -> Case:
    class Normed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(WIDTH), inner

        def forward(self, x):
            return x + self.inner(self.norm(x))

    class Model(LanguageModel):
        def __init__(self):
            super().__init__()
            pairs = [nn.ModuleList([Normed(Attention()), Normed(feed_forward())]) for _ in range(2)]
            self.layers = nn.ModuleList(pairs)

        def body(self, x):
            for attention, mlp in self.layers:
                x = mlp(attention(x))
            return x

    return chain(Model)


def raw_parameters() -> Case:
    """Blocks without any module inside."""

    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) * 0.02)
            self.down = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) * 0.02)

        def forward(self, x):
            return x + F.gelu(F.layer_norm(x, (WIDTH,)) @ self.up) @ self.down

    class Model(LanguageModel):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Raw() for _ in range(3)])

        def body(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    return chain(Model)


def encoder_and_decoder() -> Case:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 4 * WIDTH, batch_first=True)

        def forward(self, ids, labels):
            mask = nn.Transformer.generate_square_subsequent_mask(labels.shape[1])
            x = self.transformer(self.embedding(ids), self.embedding(labels), tgt_mask=mask)
            return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    return chain(Model)


def torch_encoder() -> Case:
    class Model(LanguageModel):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

        def body(self, x):
            return self.encoder(x)

    return chain(Model)


def experts() -> Case:
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
            self.router = nn.Linear(WIDTH, 4)
            self.experts = nn.ModuleList([feed_forward() for _ in range(4)])

        def forward(self, x):
            x = x + self.attention(self.norm1(x))
            h = self.norm2(x)
            shares = self.router(h).softmax(-1)
            return x + sum(expert(h) * shares[..., i : i + 1] for i, expert in enumerate(self.experts))

    class Model(LanguageModel):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Mixture() for _ in range(2)])

        def body(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    return chain(Model)


class TwoConvolutions(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after)

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def u_net() -> Case:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1, self.down2, self.middle = TwoConvolutions(3, 8), TwoConvolutions(8, 16), TwoConvolutions(16, 32)
            self.up2, self.up1, self.out = TwoConvolutions(48, 16), TwoConvolutions(24, 8), nn.Conv2d(8, 1, 1)

        def forward(self, x, y):
            high = self.down1(x)
            low = self.down2(F.max_pool2d(high, 2))
            lowest = self.middle(F.max_pool2d(low, 2))
            up = self.up2(torch.cat([F.interpolate(lowest, scale_factor=2.0), low], 1))
            up = self.up1(torch.cat([F.interpolate(up, scale_factor=2.0), high], 1))
            return self.out(up).square().mean() + 0 * y.sum()

    torch.manual_seed(0)
    return Model(), images(), None


def convolutions() -> Case:
    """Two parts and nothing repeated."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(),
                nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.MaxPool2d(4),
            )  # fmt: skip
            self.classifier = nn.Sequential(nn.Linear(512, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 10))

        def forward(self, x, y):
            return F.cross_entropy(self.classifier(self.features(x).flatten(1)), y)

    torch.manual_seed(0)
    return Model(), images(), None


def no_parts() -> Case:
    """Layers only, and functions between them: the model itself is all that can be recomputed."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.conv3, self.out = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 10)

        def forward(self, x, y):
            x = F.gelu(self.conv3(F.gelu(self.conv2(F.gelu(self.conv1(x))))))
            return F.cross_entropy(self.out(x.mean((2, 3))), y)

    torch.manual_seed(0)
    return Model(), images(), None


class Plain(LanguageModel):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.layers = nn.ModuleList([Block(dropout=dropout) for _ in range(3)])

    def body(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def called_twice() -> Case:
    """R-drop: two passes with other dropout, and the divergence between them."""

    def loss(model, batch):
        one, other = model.logits(batch["ids"]), model.logits(batch["ids"])
        classes = sum(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) for logits in (one, other))
        return classes + F.kl_div(one.log_softmax(-1), other.log_softmax(-1), log_target=True, reduction="batchmean")

    torch.manual_seed(0)
    return Plain(), token_ids(), loss


def siamese() -> Case:
    """An encoder that runs twice inside the model, on inputs of two lengths."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = Plain()

        def forward(self, ids, labels):
            embedding = self.encoder.embedding
            one, other = (F.normalize(self.encoder.body(embedding(i)).mean(1), dim=-1) for i in (ids, labels))
            return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(ids)))

    torch.manual_seed(0)
    batch = token_ids()
    return Model(), {"ids": batch["ids"], "labels": batch["ids"].flip(1)[:, :30]}, None


class Critic(nn.Module):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(WIDTH), feed_forward()

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList([Critic.Layer() for _ in range(3)])

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def points() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(128, 8, generator=generator), "y": torch.randn(128, 8, generator=generator)}


def gradient_penalty() -> Case:
    def loss(model, batch):
        x = batch["x"].clone().requires_grad_()
        real, made = model(batch["y"]).mean(), model(x)
        (slope,) = torch.autograd.grad(made.sum(), x, create_graph=True)
        return real - made.mean() + ((slope.norm(dim=-1) - 1) ** 2).mean()

    torch.manual_seed(0)
    return Critic(), points(), loss


def gradient_of_inputs() -> Case:
    """An adversarial loss: the gradient by the input is taken as a constant."""

    def loss(model, batch):
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x)
        return model(batch["y"] + 0.1 * slope.sign()).square().mean()

    torch.manual_seed(0)
    return Critic(), points(), loss


CASES: dict[str, Callable[[], Any]] = {
    case.__name__: case
    for case in (
        module_dict, attributes, plain_list, plain_tuple_of_dicts, nested_lists, stage_modules, shared_block,
        sublayers_in_pairs, raw_parameters, encoder_and_decoder, torch_encoder, experts, u_net, convolutions, no_parts,
        called_twice, siamese, gradient_penalty, gradient_of_inputs,
    )
}  # fmt: skip
