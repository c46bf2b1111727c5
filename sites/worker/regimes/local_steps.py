"""The regimes `local_sgd` and `diloco`: sites take steps of their own, and then meet.

Each site takes H steps with the script's optimizer, by gradients of its own data. At the end of
the H-th one, before the step is recorded, all sites exchange how far their parameters have moved
from where they began: the pseudo-gradient. Its mean, weighted by the sites' tokens, is what the
outer optimizer steps by. Its result, the global parameters, is what every site goes on from, with
the same bits:

    backward          the site's own mean gradient is in `p.grad`, as the hooks leave it
    the script        clips, calls optimizer.step()
    each H-th step    send (G - theta) tokens; wait; G and M by the outer step; theta := G

Training waits for the round. Gradients and their norms are the site's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.checks.module_hooks import ModuleHook
from isthmus.sites.worker.exchange.rounds import Landing, Round
from isthmus.sites.worker.exchange.sharding import laid_out_as, local_of
from isthmus.sites.worker.layouts.agreed_hook import AgreedHook
from isthmus.sites.worker.regimes.outer_buckets import Entry, OuterBuckets
from isthmus.sites.worker.regimes.outer_shard import OuterShard, Rates, Rounded
from isthmus.topology.spec.regime import Regime

if TYPE_CHECKING:
    from isthmus.sites.checkpoint.training_state import Forms, Tensors

_GLOBAL, _MOMENTUM = "global/", "momentum/"
_COUNT = "step"
"""The key of an optimizer's own count of steps, which is the same at all sites."""


class LocalSteps:
    """One rank's part. For the training thread.

    It is also the `OuterState` of a checkpoint: global parameters and outer momentum, which are
    written after steps with which a round ends. At these the moments of the inner optimizer are
    averaged over the sites, too, so that there is one state of all.
    """

    def __init__(
        self,
        hook: AgreedHook,
        buckets: OuterBuckets,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        regime: Regime,
        *,
        num_sites: Callable[[int], int],
        counts: Callable[[], bool],
        warn: Callable[[str], None],
    ) -> None:
        """Count the tokens of what `hook` averages inside the site.

        Args:
            hook: averages gradients inside the site.
            buckets: what crosses.
            models: that are trained.
            optimizers: the inner ones, in the order in which they step.
            regime: a local kind.
            num_sites: returns how many sites take part, the same at all ranks, so many steps after
                the next one.
            counts: whether this site takes part now; else it only gets results.
            warn: tells people something.
        """
        self._hook = hook
        self._buckets = buckets
        self._regime = regime
        self._num_sites = num_sites
        self._counts = counts
        self._trained = {
            name: each
            for name, each in hook.own.items()
            if isinstance(each, nn.Parameter) and each.requires_grad
        }
        self._shards: Sequence[OuterShard] = ()
        """The outer optimizer's part of each bucket; none before the first step."""
        self._tokens = [0.0] * regime.fragments
        """This rank's tokens since each fragment was last in a round."""
        self._latest_tokens = 0.0
        """This rank's tokens in the latest round."""
        self._step = 0
        """The latest one."""
        self._has_moved = False
        """Parameters are the site's own: the latest step was none with which a round ends."""
        self._is_away = False
        """Parameters hold the global ones for a while, amid a round."""
        self._landed: list[Round] = []
        self._restored: Tensors = {}
        """What training is to go on from, until the first step."""
        self._common: Tensors = {}
        """The state of the latest step, if that is to be written."""
        self.max_norm = math.inf
        """Gradients are the site's own: nobody asks."""
        self._squares: torch.Tensor | None = None
        """Sum of squares of the site's gradient."""
        self._unfit_step: torch.Tensor | None = None
        """The first step of the round whose gradient of the site was not finite, on its device; 0:
        none was."""
        hook.after_gradients = self._note_gradients
        self._optimizers = optimizers
        self._is_over = False
        """The step has ended for which there were gradients last."""
        self._warn: Callable[[str], None] | None = warn
        """None: people have been told."""
        self._undo = [each.register_step_pre_hook(self._before_step).remove for each in optimizers]
        for each in models:
            self._watch_use(each.module if isinstance(each, DistributedDataParallel) else each)

    # ---------------------------------------------------------------- what others ask

    def finish(self) -> None:
        """Do nothing: nothing is under way between two steps."""

    def begin_end(self) -> bool:
        """Have the same state at all sites, the inner optimizer's, too: a round has just ended."""
        self.make_common()
        return False

    def close(self) -> None:
        """End it between two steps, the same ones at all sites: steps of their own count."""
        if self._has_moved and self._buckets.can_wait:
            self._meet()
        for each in self._undo:
            each()
        self._hook.after_gradients = None

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Have parameters hold the global ones. A collective of the site, unless they do."""
        if not self._has_moved or self._is_away:
            yield
            return
        kept = {name: local_of(each).to("cpu", copy=True) for name, each in self._trained.items()}
        self._is_away = True
        with written(self._trained) as flats:
            self._buckets.give_shards([each.parameters for each in self._shards], flats)
        try:
            yield
        finally:
            self._is_away = False
            for name, each in kept.items():
                local_of(self._trained[name]).copy_(each)

    def norm(self) -> float:
        """Return the 2-norm of the gradient in `p.grad`, the site's own."""
        return 0.0 if self._squares is None else math.sqrt(float(self._squares))

    def take_rounds(self) -> list[Round]:
        """Return the rounds over sites that have landed since the last call."""
        landed, self._landed = self._landed, []
        return landed

    def _watch_use(self, model: nn.Module) -> None:
        """Warn once, where a script evaluates or saves what only this site has."""

        def note_pass(module: nn.Module, _: object) -> None:
            if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
                note("is evaluated", module)

        def note_saved(module: nn.Module, *_: object) -> None:
            note("gives its state_dict()", module)

        def note(what: str, module: nn.Module) -> None:
            if module is model and self._has_moved and not self._is_away and self._warn:
                self._warn(
                    f"regime {self._regime.kind}: after step {self._step} the model {what} with "
                    "parameters that only this site has: evaluate, save and average weights inside "
                    "`with site.global_parameters():`"
                )
                self._warn = None

        self._undo.append(model.register_forward_pre_hook(ModuleHook(note_pass)).remove)
        self._undo.append(model.register_state_dict_pre_hook(ModuleHook(note_saved)).remove)  # type: ignore[no-untyped-call]

    # ---------------------------------------------------------------- a step

    def _note_gradients(self) -> None:
        assert self._hook.latest is not None, "a round has just ended"
        self._is_over = False
        if not self._shards:
            self._begin()  # before a script perturbs parameters and puts them back, rounded
        grads = {name: each.grad for name, each in self._trained.items()}
        self._squares = self._buckets.site_squares(
            {name: local_of(each) for name, each in grads.items() if each is not None}
        )
        if self._counts():
            self._tokens = [each + self._hook.latest.tokens for each in self._tokens]

    def _before_step(self, *_: object) -> None:
        """Note what the first step begins with.

        Raises:
            ScriptError: parameters are put back later, or an optimizer steps after the last one.
        """
        if self._is_away:
            raise ScriptError(
                "site.global_parameters: the optimizer steps inside it, and parameters are put "
                "back at its end: step outside"
            )
        if self._is_over and len(self._optimizers) > 1:
            raise ScriptError(
                f"regime {self._regime.kind}: a step ends with the optimizer that site.attach was "
                "given last, and another one has stepped after it: give them in the order in which "
                "they step"
            )
        if not self._shards:
            self._begin()

    def _begin(self) -> None:
        """Take the parameters for the global ones, or what there is to go on from."""
        restored, self._restored = self._restored, {}
        own = {name: local_of(each) for name, each in self._trained.items()}
        values = {name: local_of(restored.get(_GLOBAL + name, each)) for name, each in own.items()}
        parameters = self._buckets.take_shards(_flat(values))
        momenta: Sequence[torch.Tensor | None] = [None] * len(parameters)
        if self._regime.full_momentum:
            momenta = [*map(torch.zeros_like, parameters)]
            if any(each.startswith(_MOMENTUM) for each in restored):
                zeros = {name: torch.zeros_like(each) for name, each in own.items()}
                found = {
                    name: local_of(restored.get(_MOMENTUM + name, each))
                    for name, each in zeros.items()
                }
                momenta = self._buckets.take_shards(_flat(found))
        self._shards = [
            OuterShard(
                of, momentum, [Rounded(*part) for part in each.dtypes() if _is_short(part[2])]
            )
            for each, of, momentum in zip(self._buckets.buckets, parameters, momenta, strict=True)
        ]

    def before_end(self, step: int) -> Landing | None:
        """Meet the other sites, if a round ends with this step."""
        self._note_step(step)
        if self._regime.lands_at(step):
            self._meet()
        return None

    def _note_step(self, step: int) -> None:
        self._step, self._common, self._has_moved, self._is_over = step, {}, True, True
        self._note_unfit(step)

    def _note_unfit(self, step: int) -> None:
        """Note the first step of a round whose gradient is not finite; on CUDA nothing waits."""
        if self._squares is None:
            return
        if self._unfit_step is None or (step - 1) % self._regime.sync_every == 0:
            self._unfit_step = torch.zeros_like(self._squares)
        is_first = ~self._squares.isfinite() & (self._unfit_step == 0.0)
        self._unfit_step = torch.where(is_first, float(step), self._unfit_step)

    def _since(self) -> str:
        """Return a clause that names the first step whose gradient was not finite; else empty."""
        step = 0 if self._unfit_step is None else int(self._unfit_step)
        return f"; the site's gradient was not finite first in step {step}" if step else ""

    def _meet(self) -> None:
        """Have parameters be the global ones, by a round of all sites."""
        self._set_rates(self._shards)
        self._latest_tokens = max(self._tokens)
        self._tokens = [0.0] * len(self._tokens)
        with written(self._trained) as flats:
            tokens, shards = self._latest_tokens, self._shards
            self._landed.append(self._buckets.exchange(tokens, flats, shards, self._since))
        self._has_moved = False

    def _set_rates(self, shards: Sequence[OuterShard]) -> None:
        """Have a round of these shards, which begins now, end with the outer step of this step."""
        rates = Rates(*self._regime.outer_rates(self._step, self._num_sites(0)))
        for each in shards:
            each.rates = rates

    def after_end(self) -> None:
        """Do nothing: the round was in the step."""

    # ---------------------------------------------------------------- state

    def make_common(self, *, crosses: bool = True) -> bool:
        """Have the same state at all sites after this step, if a round has ended with it.

        Averages the inner optimizer's moments over the sites, which do so after the same steps.
        One for which nothing crosses has those of the site that writes it. There is none in a
        script that has destroyed its process groups.
        """
        if self._common:
            return True
        if self._has_moved or not self._shards or not self._buckets.can_wait:
            return False
        if crosses:
            self._average_moments()
        self._note_common()
        return True

    def _note_common(self) -> None:
        """Have the global parameters and the momentum be what is written."""
        self._common = self._gathered(_GLOBAL, [each.parameters for each in self._shards])
        momenta = [each.momentum for each in self._shards if each.momentum is not None]
        if momenta:
            self._common |= self._gathered(_MOMENTUM, momenta)

    def tensors(self) -> Tensors:
        """Return what all sites have beside the model, after `make_common`: references."""
        return self._common

    def to_load(self, stored: Forms) -> Tensors:
        """Return tensors to load what was stored into, of what this rank has a part of."""
        found: Tensors = {}
        for path in stored:
            prefix, _, name = path.partition("/")
            if f"{prefix}/" in (_GLOBAL, _MOMENTUM) and name in self._trained:
                parameter = self._trained[name]
                found[path] = laid_out_as(parameter, _blank(parameter))
        return found

    def take(self, tensors: Tensors) -> None:
        """Go on from what was loaded; nothing: from the parameters."""
        self._restored, self._shards = tensors, ()

    def _gathered(self, prefix: str, shards: Sequence[torch.Tensor]) -> Tensors:
        """Return all of what ranks of this site have in shards, laid out as the parameters are."""
        flats = {name: _blank(each) for name, each in self._trained.items()}
        self._buckets.give_shards(shards, flats)
        return {
            prefix + name: laid_out_as(self._trained[name], flat) for name, flat in flats.items()
        }

    def _average_moments(self) -> None:
        """Average what the inner optimizers have of each element of a parameter over the sites.

        First all ranks of all sites tell which moments they have. Where a site has not used a
        parameter, it gets the others' moments of it, and the count of the first site that has any:
        so all have what a run has that goes on from here. Where only sites are left that have just
        caught up, and so none has a token, each counts as much as any other.
        """
        names = {id(each): name for name, each in self._trained.items()}
        owners = {
            names[id(each)]: (optimizer.state, group)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for each in group["params"]
            if id(each) in names
        }
        kept, has_tokens = self._buckets.agree_on_entries(
            {
                name: _entries_of(state.get(self._trained[name], {}), self._trained[name])
                for name, (state, _) in owners.items()
            },
            self._latest_tokens,
        )
        weight = self._latest_tokens if has_tokens else 1.0
        moments: dict[str, dict[str, torch.Tensor]] = {}
        for name, entries in kept.items():
            for key, entry in entries.items():
                of_key = moments.setdefault(key, {}) if entry[1] is None else {}
                if name in owners:
                    state, group = owners[name]
                    parameter = self._trained[name]
                    _keep(state[parameter], key, entry, parameter, group)
                    of_key[name] = state[parameter][key]
        for place, (key, found) in enumerate(sorted(moments.items())):
            with written(found) as flats:
                absent = {
                    name: torch.zeros_like(local_of(each)).view(-1)
                    for name, each in self._trained.items()
                    if name not in found
                }
                self._buckets.average_exactly(weight, absent | flats, key, place)


def _entries_of(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Entry]:
    """Return what an optimizer keeps of a parameter: its moments, and what is a number."""
    entries: dict[str, Entry] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            if type(value) in (int, float):
                entries[key] = ("", value)
            continue
        dtype = str(value.dtype).removeprefix("torch.")
        if value.shape == parameter.shape and value.is_floating_point() and key != _COUNT:
            entries[key] = (dtype, None)
        elif value.numel() == 1:
            entries[key] = (dtype, value.item())
    return entries


@torch.no_grad()
def _keep(
    state: dict[str, Any],
    key: str,
    entry: Entry,
    parameter: torch.Tensor,
    group: Mapping[str, Any],
) -> None:
    """Have an optimizer's state of a parameter keep a number, or a moment: zeros, if it is new."""
    dtype, number = entry
    if not dtype:
        state[key] = number
    elif isinstance(state.get(key), torch.Tensor):
        if number is not None:
            state[key].fill_(number)
    elif number is None:
        state[key] = torch.zeros_like(parameter, dtype=getattr(torch, dtype), requires_grad=False)
    else:
        is_on_host = key == _COUNT and not (group.get("fused") or group.get("capturable"))
        device = "cpu" if is_on_host else local_of(parameter).device
        state[key] = torch.tensor(number, dtype=getattr(torch, dtype), device=device)


@contextmanager
def written(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Have what this rank holds of tensors be what is written into flat ones in this context."""
    with torch.no_grad():
        locals_ = {name: local_of(each) for name, each in tensors.items()}
        flats = _flat(locals_)
        yield flats
        for name, each in locals_.items():
            if each.data_ptr() != flats[name].data_ptr():
                each.copy_(flats[name].view(each.shape))


def _flat(locals_: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.contiguous().view(-1) for name, each in locals_.items()}


def _is_short(dtype: torch.dtype) -> bool:
    """Whether a dtype cannot hold a float32."""
    return dtype in (torch.bfloat16, torch.float16)


def _blank(parameter: torch.Tensor) -> torch.Tensor:
    """Return a flat float32 tensor for this rank's elements of a parameter, on the host."""
    return torch.zeros(local_of(parameter).numel(), dtype=torch.float32, device="cpu")
