"""The regime `delayed`: each gradient counts one step late, so a whole step hides its crossing.

In sync, a gradient crosses while the rest of the same backward pass goes on. With many
micro-batches that is a small part of the step. Here the sites' mean of step k is applied by the
optimizer's step k + 1, whatever the model's layout:

    backward k + 1    the site's own mean gradient is in `p.grad`, as the hooks leave it
    its end           wait for round k; exchange `p.grad` with its result
    the script        clips, calls optimizer.step(): by the gradient of step k
    step's end        send the site's own mean gradient: round k + 1

The next gradient would then be computed at parameters that lack the one under way. So passes
compute at a guess: where the optimizer would arrive by the site's own gradient (guesses.py).

The first step has nothing to apply: gradients are zeros there, and None to the optimizers, which
leave parameters without a gradient as they are. The last gradient is never applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.exchange.rounds import Round
from isthmus.sites.worker.exchange.sharding import laid_out_as, local_of
from isthmus.sites.worker.layouts.gradient_hook import GradientHook
from isthmus.sites.worker.regimes.guesses import Guesses, exchange
from isthmus.sites.worker.regimes.loop import Attached, RegimeLoop

if TYPE_CHECKING:
    from isthmus.sites.checkpoint.training_state import Forms, Tensors


_NORMS = "norms"
GRADIENT = "gradient/"
"""Before the names of parameters, in the path of a gradient that is to be applied."""


class Delayed(RegimeLoop):
    """One rank's part. For the training thread.

    Its state is the gradient that is still to be applied.
    """

    stays_inside = True

    def __init__(
        self,
        attached: Attached,
        *,
        looks: bool,
        copy_state: Callable[[], None],
        note_last: Callable[[int | None], None],
    ) -> None:
        """Take over what the hook leaves in `p.grad`.

        Args:
            attached: what is trained.
            looks: compute gradients at a guess; else at the parameters.
            copy_state: called before a backward pass changes parameters.
            note_last: called in the last step, whose own gradient is applied in it, with the number
                of the round of the step before; None: this process had none.

        Raises:
            TypeError: nobody knows how to look ahead by one of the optimizers.
        """
        super().__init__()
        hook = self._hook = attached.hook
        self._buckets = attached.buckets
        self._counts = attached.counts
        self._note_last = note_last
        self._trained = hook.trained
        self._gradients = {
            name: torch.zeros_like(local_of(each)).view(-1) for name, each in self._trained.items()
        }
        """Until a round is sent, the site's gradient of the latest step. Then that of all sites."""
        self._unused: set[str] = set()
        """Parameters of which the site had no gradient in the latest step."""
        self._tokens: float | None = None
        """This rank's weight in the gradient that is to be sent; None: there is none."""
        self._sent: Round | None = None
        """The round that is open, or has been waited for and not applied."""
        self._applied: Round | None = None
        """The round whose gradient is in `p.grad`, if it has been in one of this process."""
        self._restored: set[str] | None = None
        """The gradient of all sites came with the run's state, and is to be applied next."""
        self._is_last = False
        """The next step, or the present one, applies its own gradient, too."""
        self._has_none = False
        """There is no gradient to apply yet: what is in `p.grad` are zeros."""
        self._stepping: Optimizer | None = None
        """The optimizer whose step goes on, and may have passes in it (a closure)."""
        self._norm = 0.0
        """The 2-norm of a gradient that came with the run's state."""
        self._guesses: Guesses | None = None
        """At which passes compute; None: they do at the parameters."""
        if looks:
            self._guesses = Guesses(attached, copy_state)
        hook.after_gradients = self._exchange_gradients
        self._undo = [
            each.register_step_pre_hook(self._begin_step).remove for each in attached.optimizers
        ]

    # ---------------------------------------------------------------- what others ask

    def finish(self) -> None:
        """Wait for what is under way."""
        self._wait_sent()

    def close(self) -> None:
        """End it between two steps."""
        self.finish()
        for each in self._undo:
            each()
        if self._guesses is not None:
            self._guesses.close()
        self._hook.after_gradients = None

    def global_parameters(self) -> AbstractContextManager[None]:
        """Have passes compute at what parameters hold, too: what all sites have."""
        return nullcontext() if self._guesses is None else self._guesses.away()

    def norm(self, hook: GradientHook) -> float:
        """Return the 2-norm of the gradient in `p.grad`; 0: there is none."""
        del hook  # it has had the site's own
        return self._norm if self._applied is None else self._applied.norm

    def before_end(self, step: int) -> None:
        """Note that the last optimizer has stepped: what is applied came in the backward pass."""
        del step
        self._stepping = None

    def begin_end(self) -> bool:
        """Let the next step apply the gradient under way and its own, so that none is left."""
        self._is_last = self._sent is not None or self._restored is not None
        return self._is_last

    # ---------------------------------------------------------------- state

    def make_common(self, *, crosses: bool = True) -> bool:
        """Have the same state at all sites after this step, with what would still be under way.

        Waits for the gradient of this step to cross. All sites do so after the same steps.
        """
        del crosses  # there is nothing to send then
        self.after_end()
        self._wait_sent()
        if self._sent is not None:
            self._aim(self._with_result(self._sent), self._sent.norm)
        return True

    def _wait_sent(self) -> None:
        """Wait for what is under way; forget it if the script has destroyed its process groups."""
        if self._sent is None:
            return
        if self._buckets.can_wait:
            self._buckets.wait(self._sent)
        else:
            self._sent = None

    def tensors(self) -> Tensors:
        """Return the gradient that the next step applies, after `make_common`: references."""
        if self._sent is None:
            return {}
        tensors = {
            f"{GRADIENT}{name}": laid_out_as(self._trained[name], self._gradients[name])
            for name in self._with_result(self._sent)
        }
        norms = torch.tensor([self._sent.norm, self.max_norm], dtype=torch.float64, device="cpu")
        return {**tensors, _NORMS: norms}

    def to_load(self, stored: Forms) -> Tensors:
        """Return tensors to load what was stored into, of what this rank has a part of."""
        wanted = {
            path: laid_out_as(self._trained[name], self._gradients[name])
            for path in stored
            if (name := path.removeprefix(GRADIENT)) in self._trained
        }
        norms = torch.zeros(2, dtype=torch.float64, device="cpu")
        return {**wanted, _NORMS: norms} if _NORMS in stored else {}

    def take(self, tensors: Tensors) -> None:
        """Go on from what was loaded; nothing: from a run without a gradient under way."""
        if not tensors:
            return
        self._norm, self.max_norm = tensors[_NORMS].tolist()
        self._restored = {path.removeprefix(GRADIENT) for path in tensors} - {_NORMS}
        self._aim(self._restored, self._norm)

    # ---------------------------------------------------------------- a step

    def after_end(self) -> None:
        """Send the site's gradient of this step, if there was one and it has not been sent."""
        tokens, self._tokens = self._tokens, None
        if tokens is None or self._is_last:
            return
        is_clipped = self._guesses is not None and self.max_norm < math.inf
        squares = self._buckets.site_squares(self._gradients) if is_clipped else 0.0
        self._aim(self._trained.keys() - self._unused, math.sqrt(float(squares)))
        self._sent = self._buckets.send(tokens, self._gradients, self._unused)

    def _aim(self, names: Set[str], norm: float) -> None:
        """Have passes look ahead by the gradients that there are now, of this norm, of `names`."""
        if self._guesses is not None:
            self._guesses.aim(self._gradients, names, min(1.0, self.max_norm / (norm + 1e-6)))

    def _exchange_gradients(self) -> None:
        """Put the sites' gradient of the step before in the place of the site's own."""
        if self._tokens is not None:
            raise ScriptError(
                "regime delayed: two backward passes have synchronised, and no optimizer step lies "
                "between them: use no_sync in all but the last of a step. A step cannot be left "
                "out: before the backward pass of a bad batch call site.count_tokens(0), or say "
                "`regime: sync`"
            )
        assert self._hook.latest is not None, "a round has just ended"
        self._tokens = self._hook.latest.tokens if self._counts() else 0.0
        self._has_none = self._sent is None and self._restored is None
        used = self._take_result()
        self._unused = {name for name, each in self._trained.items() if each.grad is None}
        if self._is_last:
            used = self._exchange_both(used)
        with torch.no_grad():
            for name, parameter in self._trained.items():
                self._exchange_gradient(name, parameter, is_used=name in used)
        if self._stepping is not None:
            self._take_zeros(self._stepping)

    @torch.no_grad()
    def _exchange_both(self, used: Set[str]) -> set[str]:
        """Have the gradients be the mean of the one under way and of that of this step.

        Each site adds the former to its own, so that one round brings the mean, and its norm.
        Returns the parameters that have a gradient by it.

        Args:
            used: parameters that have a gradient under way.
        """
        self._note_last(None if self._applied is None else self._applied.number)
        for name, parameter in self._trained.items():
            kept, grad = self._gradients[name], parameter.grad
            if name not in used or self._tokens == 0.0:
                kept.zero_()
            if grad is not None and self._tokens != 0.0:
                kept.add_(local_of(grad).view(-1))
            kept.mul_(0.5)
        self._unused -= used
        assert self._tokens is not None, "it was taken"
        self._applied = self._buckets.send(self._tokens, self._gradients, self._unused)
        self._buckets.wait(self._applied)
        self._landed.append(self._applied)
        return self._with_result(self._applied)

    def _take_result(self) -> set[str]:
        """Wait for the round that was sent; return the parameters that have a gradient by it."""
        restored, self._restored = self._restored, None
        self._applied, self._sent = self._sent, None
        if self._applied is None:
            return restored or set()
        self._buckets.wait(self._applied)
        self._landed.append(self._applied)
        return self._with_result(self._applied)

    def _with_result(self, landed: Round) -> set[str]:
        if not self._unused and not landed.is_catching_up:
            return {*self._trained}
        return self._buckets.used()

    def _exchange_gradient(self, name: str, parameter: nn.Parameter, *, is_used: bool) -> None:
        """Put one gradient where its parameter's is, and keep the site's own."""
        kept = self._gradients[name]
        if parameter.grad is None:
            if is_used:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
                local = local_of(parameter.grad)
                local.copy_(kept.view(local.shape))
            kept.zero_()
            return
        own = local_of(parameter.grad)
        if is_used:
            exchange(own, kept.view(own.shape))
        else:
            kept.view(own.shape).copy_(own)
            if self._has_none:  # a script may clip it, or measure it
                own.zero_()
            else:
                parameter.grad = None
        if self._tokens == 0.0:
            kept.zero_()  # Not a product: a loss over no tokens is often NaN.

    def _begin_step(self, optimizer: Optimizer, *_: object) -> None:
        self._stepping = optimizer
        self._take_zeros(optimizer)

    def _take_zeros(self, optimizer: Optimizer) -> None:
        """Have an optimizer leave its parameters out, in the step that has no gradient yet."""
        if not self._has_none:
            return
        trained = {id(each) for each in self._trained.values()}
        for group in optimizer.param_groups:
            for each in group["params"]:
                if id(each) in trained:
                    each.grad = None
