"""Blocks that write in place, alias, or hand memory to code that the dispatcher does not see."""

import torch
import torch.nn.functional as F
from trap_cases import WIDTH, trap
from trap_state import Mlp


@trap("an in-place residual on a product")
class InPlaceResidual(Mlp):
    def forward(self, x):
        hidden = self.second(F.silu(self.first(self.norm(x))))
        hidden += x
        out = self.second(F.silu(self.first(self.norm(hidden))))
        out += hidden
        return out


@trap("an in-place residual read before and after")
class ReadBeforeAndAfter(Mlp):
    def forward(self, x):
        hidden = self.second(F.silu(self.first(x)))
        before = (hidden * 2).tanh()
        hidden += x
        hidden *= 0.5
        return before * hidden.sigmoid() + (hidden + 1).sin()


@trap("in-place activations")
class InPlaceActivations(Mlp):
    def forward(self, x):
        hidden = self.first(x).relu_()
        hidden = F.silu(self.first(x) + hidden, inplace=True)
        return F.leaky_relu(x + self.second(hidden), 0.2, inplace=True)


@trap("partial writes in place")
class PartialWrites(Mlp):
    def forward(self, x):
        out = torch.empty_like(x)
        for i in range(x.shape[1]):
            out[:, i] = self.second(F.silu(self.first(x[:, i]))) + (out[:, i - 1].detach() if i else 0)
        half = torch.zeros(x.shape)
        half[..., ::2] = x[..., ::2].tanh()
        half[:, 1:] += x[:, :-1]
        return out + half.sin()


@trap("writes by index")
class IndexedWrites(Mlp):
    def forward(self, x):
        hidden = self.first(x)
        hidden = torch.where(hidden > 0, hidden, hidden.exp() - 1)
        rows = torch.tensor([0, 2, 4])
        hidden.index_put_((torch.tensor(1), rows), hidden[0, rows].tanh())
        hidden[:, rows] = hidden[:, rows].sigmoid()
        hidden = hidden.masked_fill_(hidden > 0.9, 0.5).index_fill_(1, torch.tensor([3]), 0.25)
        hidden = hidden.scatter_(-1, torch.zeros(*x.shape[:2], 1, dtype=torch.long), 1.0)
        return x + self.second(hidden.cos()).index_add(1, torch.tensor([1, 5]), x[:, :2])


@trap("writes into the block's input")
class WritesInput(Mlp):
    def forward(self, x):
        before = (x * 3).tanh()
        x.mul_(0.5)
        x += before
        return x + self.second(F.silu(self.first(x)))


@trap("writes into a view of the input")
class WritesInputView(Mlp):
    def forward(self, x):
        product = (x + 1) * (x + 2)
        x[:, 0].zero_()
        x.view(-1, WIDTH)[1::2] *= 2
        return product + self.second(F.silu(self.first(x)))


def returns(make):
    class Returns(Mlp):
        def forward(self, x):
            return make(x, self.second(F.silu(self.first(x))))

    return Returns


trap("the input itself returned")(returns(lambda x, y: x))
trap("a view of the input returned")(returns(lambda x, y: x.view(-1, WIDTH).view(x.shape)))
trap("a transposed result returned")(returns(lambda x, y: (x + y).transpose(0, 1).contiguous().transpose(0, 1)))
trap("a slice of a larger result returned")(returns(lambda x, y: torch.cat([x + y, y], 1)[:, : x.shape[1]]))
trap("an expanded result returned")(returns(lambda x, y: (x + y).mean(1, keepdim=True).expand_as(x)))


def residual_in_place(block, hidden):
    out = block(hidden)
    out += 0.5
    return out


def write_through_view(block, hidden):
    out = block(hidden)
    out.view(-1).mul_(0.5)
    return out


trap("the block's result is written by the model", call=residual_in_place)(Mlp)
trap("the block's result is written through a view", call=write_through_view)(Mlp)


@trap("the result of a norm is written by the model", call=residual_in_place)
class EndsInNeededValue(Mlp):
    def forward(self, x):
        out = self.second(F.silu(self.first(x)))
        self.side = (out * 2).square().sum()
        return out


@trap("changes of shape in place")
class ShapeInPlace(Mlp):
    def forward(self, x):
        hidden = self.first(x)
        hidden.unsqueeze_(0).transpose_(1, 2)
        wide = (hidden * 2).squeeze_(0).sigmoid()
        return x + self.second(wide.transpose(0, 1))


@trap("metadata of a constant")
class Constants(Mlp):
    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1]).tril_().bool()
        positions = torch.arange(x.shape[1]).float().mul_(0.1).sin_()
        scores = (x @ x.transpose(1, 2)).masked_fill(~mask, float("-inf"))
        return x + self.second(F.silu(self.first(scores.softmax(-1) @ x + positions[:, None])))


@trap("integer and boolean intermediate results")
class Integers(Mlp):
    def forward(self, x):
        hidden = self.first(x)
        quantised = (hidden.detach() * 20).round().clamp(-127, 127).to(torch.int8)
        positive = hidden > 0
        bytes_ = positive.to(torch.uint8) + 1
        ranks = hidden.argsort(-1).argsort(-1)
        hidden = hidden * positive + quantised.to(hidden.dtype) / 20 * bytes_ + ranks / 10
        return x + self.second(hidden.sin())


@trap("rotary embedding by complex numbers")
class Rotary(Mlp):
    def forward(self, x):
        angles = torch.outer(torch.arange(x.shape[1]).float(), torch.arange(WIDTH // 2) + 1.0)
        turn = torch.polar(torch.ones_like(angles), angles)
        rotated = torch.view_as_real(torch.view_as_complex(self.norm(x).unflatten(-1, (-1, 2))) * turn).flatten(2)
        return x + self.second(F.silu(self.first(rotated)))


@trap("conjugated complex numbers")
class Conjugates(Mlp):
    def forward(self, x):
        spectrum = torch.view_as_complex(self.first(x).tanh().unflatten(-1, (-1, 2)))
        mirrored = spectrum.conj() * spectrum.sin()
        spectrum = spectrum * 2
        crossed = (spectrum.conj() + 1).cos()
        spectrum += 0.5
        both = torch.view_as_real(mirrored + crossed.conj() * spectrum).flatten(2)
        return x + self.second(both) + mirrored.imag.sum(-1, keepdim=True) + spectrum.conj().imag.cos().sum()


@trap("Fourier transforms")
class Fourier(Mlp):
    def forward(self, x):
        return x + self.second(F.silu(self.first(torch.fft.irfft(torch.fft.rfft(x, dim=1).conj() * 1j, n=6, dim=1))))


@trap("chunks and stacks of one buffer")
class Aliases(Mlp):
    def forward(self, x):
        a, b = self.first(x).unsafe_chunk(2, dim=-1)
        c, d = torch.split(self.first(x), WIDTH, dim=-1)
        gate = a.sigmoid() * torch.stack([c, d]).sum(0)
        gate.add_(b)
        return x + gate.tanh() @ self.second.weight[:, :WIDTH].t()


@trap("unfold, expand and strides")
class Strided(Mlp):
    def forward(self, x):
        windows = F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).sin()
        spread = x.unsqueeze(2).expand(-1, -1, 3, -1) * windows.transpose(2, 3)
        return x + self.second(F.silu(self.first(spread.as_strided(x.shape, (*spread.stride()[:2], 1)))))


class NumpyExp(torch.autograd.Function):
    """Its result is written by numpy into uninitialised memory: the dispatcher sees only `empty`."""

    make = staticmethod(torch.empty_like)

    @staticmethod
    def forward(ctx, x):
        out = NumpyExp.make(x)
        out.numpy()[...] = numpy_exp(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (out,) = ctx.saved_tensors
        return gradient * out


def numpy_exp(x: torch.Tensor):
    import numpy

    return numpy.exp(numpy.clip(x.detach().numpy(), -3, 1))


class NumpyExpOverZeros(NumpyExp):
    @staticmethod
    def forward(ctx, x):
        out = torch.zeros_like(x)
        out.numpy()[...] = numpy_exp(x)
        ctx.save_for_backward(out)
        return out


class NumpyExpInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.numpy()[...] = numpy_exp(x)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        (out,) = ctx.saved_tensors
        return gradient * out


def through(function):
    class Through(Mlp):
        def forward(self, x):
            hidden = self.first(x)
            early = (hidden * 2).sin()
            result = function.apply(hidden)
            return x + self.second(early * (result * 0.5).tanh())

    return Through


trap("a function that numpy writes into empty memory")(through(NumpyExp))
trap("a function that numpy writes over zeros")(through(NumpyExpOverZeros))
trap("a function that numpy writes in place")(through(NumpyExpInPlace))


@trap("numpy's result changed in place by PyTorch")
class NumpyThenInPlace(Mlp):
    def forward(self, x):
        hidden = self.first(x)
        half = torch.empty_like(hidden)
        half.numpy()[:, :3] = numpy_exp(hidden)[:, :3]
        half[:, 3:] = hidden[:, 3:].detach()
        half.mul_(2)
        other = torch.empty_like(half)
        other.copy_(half)
        return x + self.second((hidden * half).tanh() + other)


@trap("numpy writes over an operator's result")
class NumpyOver(Mlp):
    def forward(self, x):
        scale = x.detach() * 2
        early = (self.first(x) * scale.sum(-1, keepdim=True)).sin()
        scale.numpy()[...] += 1
        late = (self.first(x) * scale.sum(-1, keepdim=True)).sin()
        return x + self.second(early * late)


@trap("numpy keeps a hold of a tensor")
class NumpyHolds(Mlp):
    def forward(self, x):
        scale = x.detach() * 2
        memory = scale.numpy()
        hidden = self.first(x)
        for _ in range(3):
            memory += 1
            hidden = hidden * (scale.mean(-1, keepdim=True) * 0.1).cos()
        return x + self.second(hidden.tanh())


@trap("writes into another block's result through .data")
class WritesResultThroughData(Mlp):
    def forward(self, x):
        x.data.clamp_(-0.1, 0.1)  # the block before saved it for backward
        return self.second(self.first(x)).tanh()


@trap("a write behind autograd's back")
class DataWrite(Mlp):
    def forward(self, x):
        hidden = self.first(x).exp()
        hidden.data.clamp_(max=1.0)
        later = (hidden * 2).tanh()
        later.data[:, 0] = 0.5
        return x + self.second(later)


@trap("a write through an older alias")
class OlderAlias(Mlp):
    def forward(self, x):
        hidden = self.first(x)
        alias = hidden.data
        hidden = hidden.relu_()
        alias[:, 0] = 0.3
        return x + self.second(hidden.sin())


@trap("dtype views")
class DtypeViews(Mlp):
    def forward(self, x):
        hidden = self.first(x)
        signs = (hidden.detach() * 1.0).view(torch.int32)
        signs &= 0x7FFFFFFF
        return x + self.second(hidden * signs.view(torch.float32).sqrt())
