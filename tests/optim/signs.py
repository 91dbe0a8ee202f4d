"""An optimizer as a user writes one: sign descent with a momentum, in plain PyTorch."""

import torch


class Signs(torch.optim.Optimizer):
    """It takes no weight decay, and calls its rate as everybody does."""

    def __init__(self, params, lr=1e-3, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                parameter.sub_(state["momentum"].sign(), alpha=group["lr"])


class Function:
    """No optimizer."""
